#include "client.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

typedef struct code_row {
    const char *name;
    lz_retry retry;
    const char *advice; /* what to do: the first line of what comes from a broker */
} code_row;

/* In the order of lz_code. */
static const code_row CODES[] = {
    {"OK", LZ_RETRY_NEVER, ""},
    {"ERROR", LZ_RETRY_NEVER, "Read what the broker says; its log is broker.log in the runtime folder."},
    {"INVALID_ARGUMENT", LZ_RETRY_NEVER, "Correct the call: no backend can serve it as it is."},
    {"NOT_CONNECTED", LZ_RETRY_NEVER, "Start a broker with `lz up`, then connect again."},
    {"NO_BACKEND", LZ_RETRY_NEVER,
     "Read the report's candidates: each says why it cannot serve the call, and what would help."},
    {"BACKEND_ERROR", LZ_RETRY_OTHER_BACKEND,
     "Read the report's attempts, and call without a backend or with another one."},
    {"DEADLINE", LZ_RETRY_OTHER_BACKEND, "Give the call a longer timeout_s, or another backend."},
    {"UNREACHABLE", LZ_RETRY_SAME, "Make the call again with other memory: a worker may still write to this."},
    {"POISON", LZ_RETRY_NEVER, "Do not make this call again: these inputs have ended two workers."},
    {"OUTPUT_TOO_SMALL", LZ_RETRY_SAME, "Make the call again with outputs of the sizes in `needed`."},
    {"DIGEST_REQUIRED", LZ_RETRY_SAME, "Make the call again."},
    {"ADAPTATION_REQUIRED", LZ_RETRY_SAME, "Make the tensors that are named contiguous, then call again."},
    {"RUN_IN_PROCESS", LZ_RETRY_SAME,
     "Take the backend out of the policy's in_process rules: this library runs no kernels."},
    {"BUSY", LZ_RETRY_SAME, "Wait for some of the open calls, then make the call again."},
    {"CANCELLED", LZ_RETRY_NEVER, "Connect again: the client was closed before the call ended."},
    {"BROKER_LOST", LZ_RETRY_SAME, "Start a broker with `lz up`, close this client and connect again."},
    {"VERSION_MISMATCH", LZ_RETRY_NEVER,
     "Use a library and a broker of one version: run the command that follows, or rebuild."},
    {"BAD_MESSAGE", LZ_RETRY_OTHER_BACKEND, "Report this: a process of LayerZero broke the protocol."},
    {"NOT_ALLOWED", LZ_RETRY_NEVER,
     "Name the stack's secret (LAYERZERO_SECRET_FILE), or connect as the broker's user."},
    {"ENV_BROKEN", LZ_RETRY_NEVER, "Repair the backend's environment: `lz doctor` says how."},
    {"ENV_CHANGED", LZ_RETRY_NEVER, "Build the backend's environment again: `lz env build`."},
    {"NO_MEMORY", LZ_RETRY_NEVER, "Free shared memory, or allow more of it, then try again."},
    {"CUDA", LZ_RETRY_OTHER_BACKEND, "Look at the GPU with `lz doctor`; call with another backend."},
    {"CUDA_GRAPH_UNSAFE", LZ_RETRY_NEVER, "Make this call outside of a captured graph."},
    {"NO_TRANSPORT", LZ_RETRY_OTHER_BACKEND, "Name another backend: this memory does not reach its worker."},
    {"REMOTE_EXCEPTION", LZ_RETRY_NEVER, "Read what the function raised in its environment."},
    {"CONFIG", LZ_RETRY_NEVER, "Correct the setting that is named."},
    {"GROUP_BROKEN", LZ_RETRY_SAME, "Form the group again without the rank that is named."},
    {"RANKS_DISAGREE", LZ_RETRY_NEVER, "Have all ranks make the same calls in the same order."},
};
enum { CODE_COUNT = sizeof CODES / sizeof *CODES };

const char *lz_code_name(int32_t code) {
    return CODES[code >= 0 && code < CODE_COUNT ? code : LZ_ERROR].name;
}

uint32_t lz_abi_version(void) {
    return LZ_ABI_VERSION;
}

lz_code lzi_code_of(const char *name) {
    for (int code = LZ_ERROR; code < CODE_COUNT; code++)
        if (!strcmp(CODES[code].name, name))
            return (lz_code)code;
    return LZ_ERROR;
}

/* How many bytes of the message the caller's struct has. */
static size_t room_of(const lz_error *error) {
    size_t before = offsetof(lz_error, message);
    if (!error || error->struct_size < before)
        return 0;
    size_t room = error->struct_size - before;
    return room < LZ_MESSAGE_BYTES ? room : LZ_MESSAGE_BYTES;
}

void lzi_clear(lz_error *error) {
    if (error && error->struct_size >= offsetof(lz_error, needed))
        error->code = LZ_OK, error->retry = LZ_RETRY_NEVER, error->needed_count = 0;
    if (room_of(error))
        error->message[0] = 0;
}

/* Text that was cut ends with a whole character. */
static void end_text(char *text) {
    size_t nbytes = strlen(text);
    for (int i = 0; i < 3 && nbytes && !lzi_is_utf8(text, nbytes); i++)
        text[--nbytes] = 0;
}

lz_code lzi_fail(lz_error *error, lz_code code, const char *what, ...) {
    lzi_clear(error);
    if (error && error->struct_size >= offsetof(lz_error, needed)) {
        error->code = (int32_t)code;
        error->retry = (int32_t)CODES[code].retry;
    }
    size_t room = room_of(error);
    if (room) {
        va_list values;
        va_start(values, what);
        vsnprintf(error->message, room, what, values);
        va_end(values);
        end_text(error->message);
    }
    return code;
}

void lzi_add_line(lz_error *error, const char *what, ...) {
    size_t room = room_of(error), used = room ? strlen(error->message) : 0;
    if (room < used + 2)
        return;
    error->message[used] = '\n';
    va_list values;
    va_start(values, what);
    vsnprintf(error->message + used + 1, room - used - 1, what, values);
    va_end(values);
    end_text(error->message);
}

lz_code lzi_fail_as(lz_error *error, const lzi_value *said) {
    lz_code code = lzi_code_of(lzi_get_text(said, "code"));
    lzi_fail(error, code, "%s\n%s", CODES[code].advice, lzi_get_text(said, "message"));
    const lzi_value *facts = lzi_get(said, "facts"), *needed = lzi_get(facts, "needed");
    const char *command = lzi_get_text(facts, "command"), *repair = lzi_get_text(facts, "repair");
    size_t room = room_of(error);
    if (room && (*command || *repair)) {
        size_t used = strlen(error->message);
        snprintf(error->message + used, room - used, "\nRun: %s", *command ? command : repair);
        end_text(error->message);
    }
    if (code == LZ_OUTPUT_TOO_SMALL && needed && needed->type == LZI_LIST && room)
        for (uint32_t i = 0; i < needed->count && i < LZ_MAX_NEEDED; i++)
            if (needed->as.items[i].type == LZI_INT)
                error->needed[error->needed_count++] = (uint64_t)needed->as.items[i].as.integer;
    return code;
}
