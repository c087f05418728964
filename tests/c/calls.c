/* calls MODE RUNTIME_DIR LIBZMQ [NUMBER]: what the tests of calls do with liblayerzero. Says on stdout what it saw. */
#include "layerzero.h"

#include <dirent.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(what)                                                                                                    \
    do {                                                                                                               \
        if (!(what)) {                                                                                                 \
            fprintf(stderr, "line %d: not so: %s\n%s\n", __LINE__, #what, error.message);                              \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

static lz_connect_options options = {.struct_size = sizeof options};
static lz_error error = {.struct_size = sizeof error};

static lz_client *connected(void) {
    lz_client *client = NULL;
    CHECK(lz_connect(&options, &client, &error) == LZ_OK && client);
    return client;
}

static float *floats(lz_client *client, size_t count) {
    void *data = NULL;
    CHECK(lz_alloc(client, count * sizeof(float), &data, &error) == LZ_OK && (uintptr_t)data % 64 == 0);
    for (size_t i = 0; i < count; i++)
        ((float *)data)[i] = (float)((i * 37 + 11) % 101) / 25.0f - 2.0f;
    return data;
}

static lz_tensor tensor(const int64_t *shape, uint32_t ndim, void *data) {
    return (lz_tensor){
        .struct_size = sizeof(lz_tensor), .dtype = LZ_FLOAT32, .ndim = ndim, .shape = shape, .data = data};
}

static lz_call_spec silu_of(const lz_tensor *in, const lz_tensor *out) {
    return (lz_call_spec){.struct_size = sizeof(lz_call_spec),
                          .op = "silu",
                          .inputs = in,
                          .input_count = 1,
                          .outputs = out,
                          .output_count = 1};
}

static bool is_silu(const float *x, const float *y, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (fabs(y[i] - x[i] / (1 + exp(-(double)x[i]))) > 1e-5 * (1 + fabs(x[i])))
            return false;
    return true;
}

/* Make a call, and write its inputs and its output to stdout. */
static void show(lz_client *client, lz_call_spec call, const char *op, const size_t *counts) {
    lz_report *report = NULL;
    call.op = op;
    call.backend = "torch";
    CHECK(lz_call(client, &call, &report, &error) == LZ_OK);
    CHECK(report->struct_size == sizeof *report && *report->kernel_id && *report->backend && report->worker_pid > 0);
    CHECK(report->kernel_ns > 0 && report->attempt == 1 && report->candidate_count &&
          report->candidates[0].is_accepted);
    fprintf(stderr, "%s by %s\n", op, report->kernel_id);
    lz_report_free(report);
    for (size_t i = 0; i < call.input_count; i++)
        if (call.inputs[i].dtype)
            fwrite(call.inputs[i].data, sizeof(float), counts[i], stdout);
    fwrite(call.outputs[0].data, sizeof(float), counts[call.input_count], stdout);
}

static void ops(lz_client *client) {
    int64_t two[] = {4, 33}, a[] = {8, 16}, b[] = {16, 5}, ab[] = {8, 5}, one[] = {33};
    int64_t q[] = {2, 4, 6, 8}, k[] = {2, 2, 6, 8};
    size_t counts[8] = {132, 132}, products[] = {128, 80, 40}, norms[] = {132, 33, 132};
    size_t heads[] = {384, 192, 192, 0, 0, 0, 384};
    lz_tensor in[6] = {tensor(two, 2, floats(client, 132))}, out = tensor(two, 2, floats(client, 132));
    lz_call_spec call = silu_of(in, &out);
    show(client, call, "silu", counts);

    in[0] = tensor(a, 2, floats(client, 128));
    in[1] = tensor(b, 2, floats(client, 80));
    out = tensor(ab, 2, floats(client, 40));
    call.input_count = 2;
    show(client, call, "matmul", products);

    lz_attr norm[] = {{.struct_size = sizeof(lz_attr), .name = "ndim", .type = LZ_ATTR_INT, .integer = 1},
                      {.struct_size = sizeof(lz_attr), .name = "eps", .type = LZ_ATTR_FLOAT, .number = 1e-5}};
    in[0] = tensor(two, 2, floats(client, 132));
    in[1] = tensor(one, 1, floats(client, 33));
    out = tensor(two, 2, floats(client, 132));
    call.attrs = norm;
    call.attr_count = 2;
    show(client, call, "rms_norm", norms);

    lz_attr attention[] = {
        {.struct_size = sizeof(lz_attr), .name = "is_causal", .type = LZ_ATTR_BOOL, .is_true = true},
        {.struct_size = sizeof(lz_attr), .name = "scale", .type = LZ_ATTR_FLOAT, .number = 0.25},
        {.struct_size = sizeof(lz_attr), .name = "causal_alignment", .type = LZ_ATTR_TEXT, .text = "top_left"},
        {.struct_size = sizeof(lz_attr), .name = "layout", .type = LZ_ATTR_TEXT, .text = "BHSD"},
    };
    in[0] = tensor(q, 4, floats(client, 384));
    in[1] = tensor(k, 4, floats(client, 192));
    in[2] = tensor(k, 4, floats(client, 192));
    for (int i = 3; i < 6; i++)
        in[i] = (lz_tensor){.struct_size = sizeof(lz_tensor)};
    out = tensor(q, 4, floats(client, 384));
    call.input_count = 6;
    call.attrs = attention;
    call.attr_count = 4;
    show(client, call, "attention", heads);
}

/* A call in whose middle a worker dies. */
static void killed(lz_client *client, float fault) {
    int64_t shape[] = {3};
    lz_tensor in = tensor(shape, 1, floats(client, 3)), out = tensor(shape, 1, floats(client, 3));
    lz_call_spec call = silu_of(&in, &out);
    lz_report *report = NULL;
    ((float *)in.data)[0] = fault;
    CHECK(lz_call(client, &call, &report, &error) == LZ_OK);
    CHECK(is_silu(in.data, out.data, 3) && report->attempt == 2 && report->attempt_count == 1);
    const lz_attempt *attempt = &report->attempts[0];
    CHECK(attempt->code == LZ_BACKEND_ERROR && !strcmp(attempt->code_name, "BACKEND_ERROR"));
    CHECK(attempt->exit_signal == 9 && attempt->exit_code == -1 && !strcmp(attempt->phase, "executing"));
    printf("%s %s %s\n", attempt->backend, attempt->kernel_id, report->backend);
    lz_report_free(report);
}

/* Inputs that end every worker: refused, and from then on recognised. */
static void poisoned(lz_client *client, float fault) {
    int64_t shape[] = {3};
    lz_tensor in = tensor(shape, 1, floats(client, 3)), out = tensor(shape, 1, floats(client, 3));
    lz_call_spec call = silu_of(&in, &out);
    lz_report *report = NULL;
    ((float *)in.data)[0] = fault;
    CHECK(lz_call(client, &call, &report, &error) == LZ_POISON && error.retry == LZ_RETRY_NEVER);
    CHECK(report->attempt_count == 2 && !*report->kernel_id);
    lz_report_free(report);
    CHECK(lz_call(client, &call, &report, &error) == LZ_POISON && report->attempt_count == 0);
    lz_report_free(report);
    ((float *)in.data)[0] = 1;
    CHECK(lz_call(client, &call, NULL, &error) == LZ_OK && is_silu(in.data, out.data, 3));
}

static void lost(lz_client *client, float fault) {
    int64_t shape[] = {3};
    lz_tensor in = tensor(shape, 1, floats(client, 3)), out = tensor(shape, 1, floats(client, 3));
    lz_call_spec call = silu_of(&in, &out);
    lz_report *report = NULL;
    void *data;
    printf("calls\n");
    fflush(stdout);
    ((float *)in.data)[0] = fault;
    CHECK(lz_call(client, &call, &report, &error) == LZ_BROKER_LOST && !report && error.retry == LZ_RETRY_SAME);
    puts(error.message);
    CHECK(lz_call(client, &call, &report, &error) == LZ_BROKER_LOST && !report);
    CHECK(lz_alloc(client, 64 << 20, &data, &error) == LZ_BROKER_LOST && !data);
    CHECK(lz_free(client, in.data, &error) == LZ_OK);
}

static void strided(lz_client *client) {
    int64_t shape[] = {5, 3}, strides[] = {1, 5};
    lz_tensor in = tensor(shape, 2, floats(client, 15)), out = tensor(shape, 2, floats(client, 15));
    lz_call_spec call = silu_of(&in, &out);
    lz_report *report = NULL;
    in.strides = strides;
    CHECK(lz_call(client, &call, &report, &error) == LZ_OK);
    for (int i = 0; i < 15; i++)
        CHECK(is_silu((float *)in.data + i / 3 + i % 3 * 5, (float *)out.data + i, 1));
    printf("%zu\n", report->copied_bytes);
    lz_report_free(report);
}

static void *work(void *with) {
    lz_client *client = with;
    int64_t shape[] = {257};
    for (int i = 0; i < 60; i++) {
        lz_error own = {.struct_size = sizeof own};
        lz_tensor in = tensor(shape, 1, NULL), out = in;
        lz_call_spec call = silu_of(&in, &out);
        lz_code code = lz_alloc(client, 257 * sizeof(float), &in.data, &own);
        code = code ? code : lz_alloc(client, 257 * sizeof(float), &out.data, &own);
        for (int j = 0; !code && j < 257; j++)
            ((float *)in.data)[j] = (float)((i * 31 + j) % 17) / 4 - 2;
        code = code ? code : lz_call(client, &call, NULL, &own);
        if (code || !is_silu(in.data, out.data, 257)) {
            fprintf(stderr, "a thread's call: %s\n", own.message);
            exit(1);
        }
        lz_free(client, in.data, NULL);
        lz_free(client, out.data, NULL);
    }
    return NULL;
}

static void threads(lz_client *client) {
    pthread_t running[8];
    for (int i = 0; i < 8; i++)
        pthread_create(&running[i], NULL, work, client);
    for (int i = 0; i < 8; i++)
        pthread_join(running[i], NULL);
}

/* An op that writes into the caller's own tensors: two tokens' keys and values, put into a cache. */
static void in_place(lz_client *client) {
    int64_t tokens[] = {2, 1, 4}, cache[] = {3, 2, 1, 4}, slots[] = {2};
    float *keys = floats(client, 8), *values = floats(client, 8), *k = floats(client, 24), *v = floats(client, 24);
    int64_t *at = (int64_t *)(void *)floats(client, 4);
    at[0] = 4, at[1] = 1;
    memset(k, 0, 24 * sizeof *k), memset(v, 0, 24 * sizeof *v);
    lz_tensor in[7] = {tensor(tokens, 3, keys), tensor(tokens, 3, values), tensor(cache, 4, k), tensor(cache, 4, v),
                       tensor(slots, 1, at)};
    lz_tensor out[2] = {in[2], in[3]};
    in[4].dtype = LZ_INT64;
    in[5] = in[6] = (lz_tensor){.struct_size = sizeof(lz_tensor)}; /* scales, of caches of 8 bits */
    lz_call_spec call = {.struct_size = sizeof call,
                         .op = "append_kv",
                         .inputs = in,
                         .input_count = 7,
                         .outputs = out,
                         .output_count = 2};
    CHECK(lz_call(client, &call, NULL, &error) == LZ_OK);
    CHECK(!memcmp(k + 16, keys, 16) && !memcmp(k + 4, keys + 4, 16) && !memcmp(v + 16, values, 16) && !k[0] && !k[12]);
}

/* More signatures than the library keeps, which forgets the oldest. */
static void signatures(lz_client *client) {
    float *x = floats(client, 128), *y = floats(client, 128);
    for (int64_t n = 0; n < 150; n++) {
        int64_t shape[] = {n % 100 + 1};
        lz_tensor in = tensor(shape, 1, x), out = tensor(shape, 1, y);
        lz_call_spec call = silu_of(&in, &out);
        CHECK(lz_call(client, &call, NULL, &error) == LZ_OK);
    }
    CHECK(is_silu(x, y, 40));
}

/* Memory that the broker refuses. */
static void refused(lz_client *client) {
    void *data;
    printf("%s\n", lz_code_name((int)lz_alloc(client, 64, &data, &error)));
}

/* A worker that cannot be reached: the call's memory is nobody's until the broker says that it is released. */
static void lent(lz_client *client) {
    int64_t shape[] = {16};
    lz_tensor in = tensor(shape, 1, floats(client, 16)), out = tensor(shape, 1, floats(client, 16)), first = out;
    lz_call_spec call = silu_of(&in, &out);
    lz_report *report = NULL;
    CHECK(lz_call(client, &call, &report, &error) == LZ_UNREACHABLE && error.retry == LZ_RETRY_SAME);
    CHECK(report->attempt_count <= 1 && !*report->kernel_id);
    lz_report_free(report);
    CHECK(lz_free(client, first.data, &error) == LZ_OK && lz_free(client, first.data, &error) == LZ_INVALID_ARGUMENT);
    out.data = floats(client, 16);
    CHECK(out.data != first.data);
    CHECK(lz_call(client, &call, NULL, &error) == LZ_OK);
    CHECK(floats(client, 16) == first.data);
}

/* What a call ends in that the broker does not answer as it should; the client stays unusable, and says why. */
static void cut(lz_client *client) {
    int64_t shape[] = {16};
    lz_tensor in = tensor(shape, 1, floats(client, 16)), out = tensor(shape, 1, floats(client, 16));
    lz_call_spec call = silu_of(&in, &out);
    lz_code code = lz_call(client, &call, NULL, &error);
    printf("%s\n%s\n", lz_code_name((int)code), error.message);
    CHECK(!code || lz_call(client, &call, NULL, &error) == code);
}

static int entries(const char *path) {
    int count = 0;
    DIR *folder = opendir(path);
    while (readdir(folder))
        count++;
    closedir(folder);
    return count;
}

static int mapped(void) {
    char line[512];
    int count = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (fgets(line, sizeof line, maps))
        count += strstr(line, "memfd:layerzero") != NULL;
    fclose(maps);
    return count;
}

static void leaves_nothing(void) {
    int before = 0;
    for (int round = 0; round < 3; round++) {
        lz_client *client = connected();
        int64_t shape[] = {64};
        void *large;
        lz_tensor in = tensor(shape, 1, floats(client, 64)), out = tensor(shape, 1, floats(client, 64));
        lz_call_spec call = silu_of(&in, &out);
        CHECK(lz_call(client, &call, NULL, &error) == LZ_OK && mapped() == 1);
        CHECK(lz_alloc(client, 9 << 20, &large, &error) == LZ_OK && mapped() == 2);
        in.data = large;
        ((float *)large)[0] = 1, memset((float *)large + 1, 0, 63 * sizeof(float));
        CHECK(lz_call(client, &call, NULL, &error) == LZ_OK && is_silu(large, out.data, 64));
        CHECK(lz_free(client, large, &error) == LZ_OK && mapped() == 1);
        for (int i = 0; i < 40; i++) /* more than one arena's worth, at once and again */
            CHECK(lz_alloc(client, 1 << 20, &large, &error) == LZ_OK && (i % 2 || !lz_free(client, large, &error)));
        lz_close(client);
        CHECK(mapped() == 0);
        if (!round)
            before = entries("/proc/self/fd");
        CHECK(entries("/proc/self/fd") == before && entries("/proc/self/task") == 3);
    }
}

static void say(const char *what, lz_code code) {
    printf("%s|%s|%d|%s\n", what, lz_code_name((int)code), error.code == (int)code, strtok(error.message, "\n"));
}

static void wrong(lz_client *client) {
    int64_t shape[] = {4}, huge[] = {(int64_t)1 << 45, 64}, negative[] = {-1};
    float *x = floats(client, 4), *y = floats(client, 4), outside[4];
    lz_tensor in = tensor(shape, 1, x), out = tensor(shape, 1, y);
    lz_call_spec call = silu_of(&in, &out), other = call;
    lz_attr attr = {.struct_size = sizeof attr, .name = "eps", .type = 9};
    lz_report *report = NULL;
    void *data;
    say("no client", lz_call(NULL, &call, NULL, &error));
    say("no call", lz_call(client, NULL, NULL, &error));
    other.op = NULL;
    say("no op", lz_call(client, &other, NULL, &error));
    other.op = "sillu";
    say("unknown op", lz_call(client, &other, NULL, &error));
    other.op = "\xff";
    say("op not text", lz_call(client, &other, NULL, &error));
    other = call, other.backend = "nobody";
    say("unknown backend", lz_call(client, &other, &report, &error));
    lz_report_free(report);
    other.backend = "jax-cuda";
    say("backend not built", lz_call(client, &other, NULL, &error));
    other = call, other.timeout_s = NAN;
    say("time", lz_call(client, &other, NULL, &error));
    other = call, other.input_count = 0;
    say("too few inputs", lz_call(client, &other, NULL, &error));
    other.input_count = 1000;
    say("too many inputs", lz_call(client, &other, NULL, &error));
    other = call, other.attrs = &attr, other.attr_count = 1;
    say("attribute of no type", lz_call(client, &other, NULL, &error));
    attr.type = LZ_ATTR_TEXT, attr.text = NULL;
    say("attribute without text", lz_call(client, &other, NULL, &error));
    attr.type = LZ_ATTR_INT;
    say("attribute too many", lz_call(client, &other, NULL, &error));
    in.struct_size = 3;
    say("size of tensor", lz_call(client, &call, NULL, &error));
    in = tensor(shape, 1, outside);
    say("memory outside", lz_call(client, &call, NULL, &error));
    in = tensor(shape, 1, x + 1);
    say("memory too short", lz_call(client, &call, NULL, &error));
    in = tensor(shape, 1, y);
    say("in place", lz_call(client, &call, NULL, &error));
    in = tensor(shape, 1, x), out.data = (char *)x + 4, out.shape = (int64_t[]){3};
    say("overlap", lz_call(client, &call, NULL, &error));
    out = tensor(shape, 1, y), in = tensor(huge, 2, x);
    say("too large", lz_call(client, &call, NULL, &error));
    in = tensor(negative, 1, x);
    say("negative", lz_call(client, &call, NULL, &error));
    in = tensor(shape, 17, x);
    say("dimensions", lz_call(client, &call, NULL, &error));
    in = tensor(shape, 1, x), in.dtype = 99;
    say("dtype", lz_call(client, &call, NULL, &error));
    in.dtype = LZ_INT32;
    say("dtype of op", lz_call(client, &call, NULL, &error));
    in.dtype = LZ_FLOAT32, out = (lz_tensor){.struct_size = sizeof out};
    say("no output", lz_call(client, &call, NULL, &error));
    say("bytes", lz_alloc(client, (size_t)1 << 60, &data, &error));
    say("memory", lz_alloc(client, (size_t)1 << 45, &data, &error));
    say("free outside", lz_free(client, outside, &error));
    say("free inside", lz_free(client, x + 1, &error));
    out = tensor(shape, 1, y); /* after all this the client goes on */
    CHECK(lz_call(client, &call, NULL, &error) == LZ_OK && is_silu(x, y, 4) && !*error.message);
    CHECK(lz_free(client, x, &error) == LZ_OK);
    say("free twice", lz_free(client, x, &error));
    struct {
        lz_error head;
        char after[8];
    } small = {.head.struct_size = offsetof(lz_error, message) + 12, .after = "after"};
    CHECK(lz_free(client, x, &small.head) && strlen(small.head.message) == 11 && !strcmp(small.after, "after"));
}

int main(int argc, char **argv) {
    if (argc < 4 || lz_abi_version() != LZ_ABI_VERSION)
        return 2;
    const char *mode = argv[1];
    float number = argc > 4 ? strtof(argv[4], NULL) : 0;
    options.runtime_dir = argv[2];
    options.libzmq = argv[3];
    if (!strcmp(mode, "unconnected")) {
        lz_client *client = NULL;
        printf("%s\n", lz_code_name((int)lz_connect(&options, &client, &error)));
        puts(error.message);
        CHECK(!client);
        lz_close(NULL);
        return 0;
    }
    if (!strcmp(mode, "leaves_nothing")) {
        leaves_nothing();
        return 0;
    }
    lz_client *client = connected();
    if (!strcmp(mode, "ops"))
        ops(client);
    else if (!strcmp(mode, "killed"))
        killed(client, number);
    else if (!strcmp(mode, "poisoned"))
        poisoned(client, number);
    else if (!strcmp(mode, "lost"))
        lost(client, number);
    else if (!strcmp(mode, "strided"))
        strided(client);
    else if (!strcmp(mode, "threads"))
        threads(client);
    else if (!strcmp(mode, "signatures"))
        signatures(client);
    else if (!strcmp(mode, "lent"))
        lent(client);
    else if (!strcmp(mode, "refused"))
        refused(client);
    else if (!strcmp(mode, "cut"))
        cut(client);
    else if (!strcmp(mode, "in_place"))
        in_place(client);
    else if (!strcmp(mode, "wrong"))
        wrong(client);
    lz_close(client);
    return 0;
}
