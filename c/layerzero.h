/* liblayerzero: a client of LayerZero's broker in C, without Python. docs/c-api.md has a whole program.
 *
 * Every function that can fail returns an lz_code: LZ_OK (0), or what went wrong, which it also writes to the lz_error
 * that it is given (NULL: nobody wants to know more).
 *
 * Structs that cross this interface begin with `struct_size`, which whoever makes the struct sets to its sizeof. A
 * later library reads of an older program's struct what it has, and writes no more than that; new fields come at the
 * end. An array of structs has one size for all. Fields that are left 0 have their default.
 *
 * Threads: an lz_client may be used by any number of threads at once, apart from lz_close, which must be the last.
 * Calls of several threads are open at the same time. The library has no global state, starts no thread of its own
 * (libzmq has two for each client), installs no signal handler and never ends the process. After a fork a client is the
 * parent's alone: the child must not use it, and may connect anew.
 */
#ifndef LAYERZERO_H
#define LAYERZERO_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define LZ_API __attribute__((visibility("default")))

/* The interface of this header. It grows when a program that was compiled with an older header would not work with a
 * newer library any more; not when functions, codes or fields are added. */
#define LZ_ABI_VERSION 1
#define LZ_MAX_DIMENSIONS 16
#define LZ_MAX_NEEDED 8
#define LZ_MESSAGE_BYTES 4096

/* LZ_ABI_VERSION of the library that is loaded: compare it with the macro before anything else. */
LZ_API uint32_t lz_abi_version(void);

/* --- errors ------------------------------------------------------------------------------------------------------- */

/* What went wrong: the codes of docs/protocol.md, section 9. A code that this library does not know is LZ_ERROR. */
typedef enum lz_code {
    LZ_OK = 0,
    LZ_ERROR = 1,
    LZ_INVALID_ARGUMENT = 2,
    LZ_NOT_CONNECTED = 3, /* there is no broker where one was looked for */
    LZ_NO_BACKEND = 4,
    LZ_BACKEND_ERROR = 5,
    LZ_DEADLINE = 6,
    LZ_UNREACHABLE = 7,
    LZ_POISON = 8,
    LZ_OUTPUT_TOO_SMALL = 9,
    LZ_DIGEST_REQUIRED = 10, /* never seen: the library answers it */
    LZ_ADAPTATION_REQUIRED = 11,
    LZ_RUN_IN_PROCESS = 12, /* never seen: the library says that it cannot */
    LZ_BUSY = 13,
    LZ_CANCELLED = 14,
    LZ_BROKER_LOST = 15,
    LZ_VERSION_MISMATCH = 16,
    LZ_BAD_MESSAGE = 17,
    LZ_NOT_ALLOWED = 18,
    LZ_ENV_BROKEN = 19,
    LZ_ENV_CHANGED = 20,
    LZ_NO_MEMORY = 21,
    LZ_CUDA = 22,
    LZ_CUDA_GRAPH_UNSAFE = 23,
    LZ_NO_TRANSPORT = 24,
    LZ_REMOTE_EXCEPTION = 25,
    LZ_CONFIG = 26,
    LZ_GROUP_BROKEN = 27,   /* never seen: between ranks of a group, which this library has not */
    LZ_RANKS_DISAGREE = 28  /* likewise */
} lz_code;

/* May another attempt help? */
typedef enum lz_retry {
    LZ_RETRY_NEVER = 0,
    LZ_RETRY_SAME = 1,         /* the same call again */
    LZ_RETRY_OTHER_BACKEND = 2 /* elsewhere only: name another backend, or none */
} lz_retry;

/* Where a function writes what went wrong. The caller's memory; nothing in it has to be freed. */
typedef struct lz_error {
    size_t struct_size;
    int32_t code;                    /* lz_code */
    int32_t retry;                   /* lz_retry */
    uint32_t needed_count;           /* with LZ_OUTPUT_TOO_SMALL: how many of `needed` are set */
    uint64_t needed[LZ_MAX_NEEDED];  /* the leading extent that each output needs, in elements */
    char message[LZ_MESSAGE_BYTES];  /* UTF-8, ends with a zero byte. The first line says what to do, the rest why */
} lz_error;

/* The code's name as in docs/protocol.md, "BROKER_LOST"; "ERROR" for what is none. Lives as long as the library. */
LZ_API const char *lz_code_name(int32_t code);

/* --- connecting --------------------------------------------------------------------------------------------------- */

typedef struct lz_client lz_client;

/* How to connect. NULL in place of the struct: all of it by default. */
typedef struct lz_connect_options {
    size_t struct_size;
    const char *runtime_dir; /* folder of the broker's sockets; NULL: LAYERZERO_RUNTIME_DIR, else
                                XDG_RUNTIME_DIR/layerzero, else /tmp/layerzero-UID */
    const char *secret_file; /* file of the stack's secret; NULL: LAYERZERO_SECRET_FILE, else none */
    const char *libzmq;      /* file of libzmq 4.2 or newer; NULL: libzmq.so.5, where the system's loader finds it */
} lz_connect_options;

/* Connect to this user's broker. None is started: without one the code is LZ_NOT_CONNECTED. The client is closed with
 * lz_close. Blocks for as long as the broker takes to answer, 10 s at most, 40 s where it starts one for this user. */
LZ_API lz_code lz_connect(const lz_connect_options *options, lz_client **client, lz_error *error);

/* Hang up, and give back all memory: pointers of lz_alloc are gone. No other thread may be in a call with this client,
 * or make one. NULL is ignored. Reports stay valid. */
LZ_API void lz_close(lz_client *client);

/* --- memory ------------------------------------------------------------------------------------------------------- */

/* Shared memory for tensors, aligned to 64 bytes, contents undefined. Tensors do not travel: workers map this memory.
 * Small blocks share an arena, those of 8 MiB or more have one each. The pages are reserved: a full system is
 * LZ_NO_MEMORY here, and never a signal later. */
LZ_API lz_code lz_alloc(lz_client *client, size_t nbytes, void **data, lz_error *error);

/* Give a block back. One that a call still uses goes when that call has ended, or its worker is known to have. NULL is
 * ignored. */
LZ_API lz_code lz_free(lz_client *client, void *data, lz_error *error);

/* --- calls -------------------------------------------------------------------------------------------------------- */

typedef enum lz_dtype {
    LZ_NO_TENSOR = 0, /* an optional input that is left out; the other fields are not read */
    LZ_BOOL = 1,
    LZ_UINT8 = 2,
    LZ_INT8 = 3,
    LZ_UINT16 = 4,
    LZ_INT16 = 5,
    LZ_UINT32 = 6,
    LZ_INT32 = 7,
    LZ_UINT64 = 8,
    LZ_INT64 = 9,
    LZ_FLOAT16 = 10,
    LZ_BFLOAT16 = 11,
    LZ_FLOAT32 = 12,
    LZ_FLOAT64 = 13,
    LZ_FLOAT8_E4M3FN = 14,
    LZ_FLOAT8_E5M2 = 15,
    LZ_FLOAT4_E2M1FN_X2 = 16 /* bytes of two numbers; shapes count bytes */
} lz_dtype;

/* A tensor that lies in memory of lz_alloc. The arrays are read during the call only. */
typedef struct lz_tensor {
    size_t struct_size;
    int32_t dtype;          /* lz_dtype */
    uint32_t ndim;          /* 0 to LZ_MAX_DIMENSIONS */
    const int64_t *shape;   /* ndim extents, 0 to 2^46 */
    const int64_t *strides; /* ndim strides in elements, 0 or more; NULL: row-major */
    void *data;             /* the first element, within a block of lz_alloc */
    size_t nbytes;          /* room at `data`, where an output's leading extent is 0 because its size depends on the
                               data (tokenize); 0: just the tensor */
} lz_tensor;

typedef enum lz_attr_type {
    LZ_ATTR_NONE = 0,
    LZ_ATTR_BOOL = 1,
    LZ_ATTR_INT = 2,
    LZ_ATTR_FLOAT = 3,
    LZ_ATTR_TEXT = 4
} lz_attr_type;

/* An attribute of the op. The field of its type is read, and no other. */
typedef struct lz_attr {
    size_t struct_size;
    const char *name;
    int32_t type;     /* lz_attr_type */
    bool is_true;     /* LZ_ATTR_BOOL */
    int64_t integer;  /* LZ_ATTR_INT */
    double number;    /* LZ_ATTR_FLOAT */
    const char *text; /* LZ_ATTR_TEXT, UTF-8 */
} lz_attr;

/* One call, in the op's canonical form: every input, output and attribute that the op has, in the op's order
 * (docs/ops.md, docs/c-api.md). */
typedef struct lz_call_spec {
    size_t struct_size;
    const char *op;
    const lz_tensor *inputs; /* they must not be written to until the call has returned */
    size_t input_count;
    const lz_tensor *outputs; /* written in full when the call returns LZ_OK; undefined otherwise */
    size_t output_count;
    const lz_attr *attrs;
    size_t attr_count;
    const char *backend; /* the only backend that may serve it; NULL: the best one */
    double timeout_s;    /* of one attempt; 0: the broker's own. At least 1 ms counts, at most a day */
} lz_call_spec;

/* Why a kernel did not accept a call. */
typedef struct lz_reason {
    size_t struct_size;
    const char *code;   /* of docs/capabilities.md, "NOT_INSTALLED" */
    const char *detail; /* names the offending and the allowed value */
    const char *repair; /* a command or change besides the call, or "" */
} lz_reason;

/* A kernel that was looked at for a call. */
typedef struct lz_candidate {
    size_t struct_size;
    const char *kernel_id;
    const char *backend;
    bool is_accepted;
    bool has_score;     /* whether `score` is set */
    bool has_measured;  /* whether `measured_us` is set */
    double score;       /* what it was ranked by, the highest first */
    double measured_us; /* what its calls have taken here */
    const lz_reason *reasons;
    size_t reason_count; /* 0 of one that was accepted */
} lz_candidate;

/* What failed before the call ended. */
typedef struct lz_attempt {
    size_t struct_size;
    const char *backend;
    const char *kernel_id;
    int64_t worker_pid;
    int32_t code;         /* lz_code */
    int32_t exit_signal;  /* the signal that ended the worker, 0: none */
    int32_t exit_code;    /* of a worker that ended by itself, -1: it did not */
    const char *code_name; /* as the broker says it: NOT_COMPILED, too, which only says that the call waited for that */
    const char *detail;
    const char *phase; /* what the worker was doing when it died: "executing", ...; "" when it did not die */
} lz_attempt;

/* How a call went. Everything in it belongs to the report, and goes with it. */
typedef struct lz_report {
    size_t struct_size;
    const char *kernel_id; /* that served it; "" when none did */
    const char *backend;
    int64_t worker_pid;
    uint64_t kernel_ns;   /* what the kernel took in its worker */
    uint32_t attempt;     /* which attempt that was, from 1 */
    double waited_s;      /* so long it waited for workers to start */
    size_t copied_bytes;  /* of inputs that the library made contiguous, because the best kernel takes no others */
    const lz_attempt *attempts; /* oldest first */
    size_t attempt_count;
    const lz_candidate *candidates; /* best first, then those that refused it */
    size_t candidate_count;
    const uint64_t *sizes; /* of an op whose results have sizes that depend on the data: the leading extent of each */
    size_t size_count;
    const char *path; /* "broker", or "express": straight to the worker (docs/c-api.md) */
} lz_report;

/* Make a call and wait for its end. `report`: where a report goes, also of a call that failed once the broker had
 * answered it, else NULL; free it with lz_report_free. NULL: nobody wants one, which saves its making. */
LZ_API lz_code lz_call(lz_client *client, const lz_call_spec *call, lz_report **report, lz_error *error);

/* NULL is ignored. */
LZ_API void lz_report_free(lz_report *report);

/* --- bundles ------------------------------------------------------------------------------------------------------ */

/* A function's calls as a file, which `lz bundle write` or lz.write_bundle has written, with its constants: opened
 * once, run any number of times, without the function. docs/bundles.md. */
typedef struct lz_bundle lz_bundle;

/* An array that a bundle takes or gives. */
typedef struct lz_bundle_tensor {
    size_t struct_size;
    const char *name;
    int32_t dtype; /* lz_dtype */
    uint32_t ndim;
    const int64_t *shape;
    uint64_t nbytes; /* in row-major order */
} lz_bundle_tensor;

/* What the calls of a backend ran in when the bundle was written. */
typedef struct lz_bundle_environment {
    size_t struct_size;
    const char *backend;
    const char *env; /* the id of its lock */
} lz_bundle_environment;

/* What is in a bundle. Belongs to it, and goes with it. */
typedef struct lz_bundle_info {
    size_t struct_size;
    const char *name;    /* of the function */
    const char *made_by; /* the version of LayerZero */
    double made_s;       /* seconds since 1970 */
    const lz_bundle_tensor *inputs;
    size_t input_count;
    const lz_bundle_tensor *outputs;
    size_t output_count;
    const lz_bundle_environment *environments;
    size_t environment_count;
    size_t step_count;       /* calls of a run */
    uint64_t constant_bytes; /* of shared memory that it holds while it is open */
    uint64_t slot_bytes;     /* likewise, for what its calls leave for each other */
} lz_bundle_info;

/* How to open a bundle. NULL in place of the struct: all of it by default. */
typedef struct lz_bundle_options {
    size_t struct_size;
    bool any_lock; /* also where an environment is locked otherwise than the bundle's, or is not there, or the broker
                      does not know a kernel; else that is LZ_ENV_CHANGED. Results may then differ within the ops'
                      tolerances */
} lz_bundle_options;

/* Open a bundle: every byte is compared with its SHA-256, every number checked, the constants are read into shared
 * memory, and the broker is asked for its environments. LZ_INVALID_ARGUMENT for a file that is none or is damaged,
 * LZ_VERSION_MISMATCH for one of another format. Close it with lz_bundle_close, before its client. */
LZ_API lz_code lz_bundle_open(lz_client *client, const char *path, const lz_bundle_options *options, lz_bundle **bundle,
                              lz_error *error);

/* Give back its memory. No other thread may be in a run of it. NULL is ignored. */
LZ_API void lz_bundle_close(lz_bundle *bundle);

/* What is in it; as long as it is open. */
LZ_API const lz_bundle_info *lz_bundle_about(const lz_bundle *bundle);

/* One run. Tensors are of the dtypes and shapes that lz_bundle_about tells, in its order, row-major, in memory of
 * lz_alloc; outputs overlap nothing. */
typedef struct lz_bundle_run_spec {
    size_t struct_size;
    const lz_tensor *inputs;
    size_t input_count;
    const lz_tensor *outputs; /* written in full when the run returns LZ_OK; undefined otherwise */
    size_t output_count;
    double timeout_s; /* of one attempt of one call; 0: the broker's own */
} lz_bundle_run_spec;

/* How a run went. */
typedef struct lz_bundle_report {
    size_t struct_size;
    const lz_report *const *steps; /* of each call; NULL where the run ended before it */
    size_t step_count;
} lz_bundle_report;

/* Run a bundle and wait for its end. Each call prefers the kernel that it had when the bundle was written; where that
 * fails, or may not serve it, the next best one does, as in lz_call. A call that fails ends the run: the error is that
 * of lz_call, and its last line names the step. One run of a bundle is under way at a time; other threads wait.
 * `report`: where a report goes, also of a run that failed, else NULL; free it with lz_bundle_report_free. */
LZ_API lz_code lz_bundle_run(lz_bundle *bundle, const lz_bundle_run_spec *run, lz_bundle_report **report,
                             lz_error *error);

/* NULL is ignored. */
LZ_API void lz_bundle_report_free(lz_bundle_report *report);

#ifdef __cplusplus
}
#endif

#endif
