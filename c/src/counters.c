/* The page of counters, docs/protocol.md, section 18: what the broker does not see of this client's calls. As
 * client/connection/counters.py; the words are those of ipc/shm/counter_page.py. */
#include "client.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../../src/layerzero/ipc/shm/_counters.h"
#include "../../src/layerzero/ipc/shm/_words.h"

enum { ROWS = 128, COUNTERS_BYTES = ROWS * COUNTER_ROW_BYTES, LABEL_AT = 8, MAX_LABEL = 248 };
enum { ERRORS_AT = COPIED_AT + 8, MAX_CODES = 32, FALLBACKS_AT = ERRORS_AT + 8 * MAX_CODES };

/* Codes by word; word 0 is of all others. tests/c compares them with the protocol's. */
static const char *const CODES[] = {
    "OTHER",
    "INVALID_ARGUMENT",
    "NOT_CONNECTED",
    "NO_BACKEND",
    "BACKEND_ERROR",
    "DEADLINE",
    "UNREACHABLE",
    "POISON",
    "OUTPUT_TOO_SMALL",
    "DIGEST_REQUIRED",
    "ADAPTATION_REQUIRED",
    "RUN_IN_PROCESS",
    "BUSY",
    "CANCELLED",
    "BROKER_LOST",
    "VERSION_MISMATCH",
    "BAD_MESSAGE",
    "NOT_ALLOWED",
    "ENV_BROKEN",
    "ENV_CHANGED",
    "NO_MEMORY",
    "CUDA",
    "CUDA_GRAPH_UNSAFE",
    "NO_TRANSPORT",
    "REMOTE_EXCEPTION",
    "CONFIG",
    "GROUP_BROKEN",
    "RANKS_DISAGREE",
};
enum { CODE_COUNT = sizeof CODES / sizeof *CODES };

static char *row_at(const lz_client *client, uint64_t row) {
    return client->counters + row * COUNTER_ROW_BYTES;
}

/* Make the page, and show the broker; once. Without memory for it, or where the broker refuses it, nothing is counted.
 */
static bool has_page(lz_client *client) {
    lzi_value answer[LZI_MAX_FIELDS];
    int fd;
    char *page;
    if (client->counters || !client->welcome.counts)
        return client->counters;
    client->welcome.counts = false;
    client->is_adding_counters = true;
    pthread_mutex_unlock(&client->lock);
    lz_code code = lzi_share("lz-counters", COUNTERS_BYTES, &fd, &page, NULL);
    if (!code) {
        lzi_shown shown = {&lzi_add_counters, NULL, fd, &lzi_counters_added, false};
        code = lzi_show(&client->memory, &shown, answer, NULL, NULL);
        close(fd);
        if (code)
            munmap(page, COUNTERS_BYTES);
    }
    pthread_mutex_lock(&client->lock);
    client->is_adding_counters = false;
    if (!code)
        client->counters = page;
    return client->counters;
}

void lzi_counters_close(lz_client *client) {
    if (client->counters)
        munmap(client->counters, COUNTERS_BYTES);
    client->counters = NULL;
}

uint64_t lzi_told_row(lz_client *client, const char *op, const lzi_told *told, const char *path) {
    lzi_value fields[LZI_MAX_FIELDS];
    lzi_pool pool = {0};
    uint64_t row = 0;
    if (told && !lzi_decode_message(&pool, &lzi_decision, told->bytes, told->nbytes, fields))
        row = lzi_counter_row(client, op, fields[0].as.bytes, path);
    lzi_pool_free(&pool);
    return row;
}

uint64_t lzi_counter_row(lz_client *client, const char *op, const char *kernel_id, const char *path) {
    uint64_t found = 0, used;
    char label[MAX_LABEL + 1];
    if (!has_page(client))
        return 0;
    int nbytes = snprintf(label, sizeof label, "%s\n%s\n%s", op, kernel_id, path);
    if (nbytes < 0)
        return 0;
    if (nbytes > MAX_LABEL)
        nbytes = 0; /* of all that there is no row for */
    used = load64((uint64_t)(uintptr_t)client->counters);
    for (uint64_t row = 1; !found && row <= used; row++) {
        const char *at = row_at(client, row);
        if (*(const uint64_t *)(const void *)at == (uint64_t)nbytes && !memcmp(at + LABEL_AT, label, (size_t)nbytes))
            found = row;
    }
    if (!found && used + 1 >= ROWS)
        found = ROWS - 1;
    if (!found) {
        found = used + 1;
        if (found == ROWS - 1)
            nbytes = 0;
        memcpy(row_at(client, found) + LABEL_AT, label, (size_t)nbytes);
        store64((uint64_t)(uintptr_t)row_at(client, found), (uint64_t)nbytes);
        store64((uint64_t)(uintptr_t)client->counters, found); /* last: the broker reads the label then */
    }
    return (uint64_t)(uintptr_t)row_at(client, found);
}

void lzi_note_copied(uint64_t row, uint64_t nbytes) {
    if (row)
        grow(row + COPIED_AT, nbytes);
}

static uint64_t place_of_code(const char *code) {
    for (uint64_t i = 1; i < CODE_COUNT; i++)
        if (!strcmp(CODES[i], code))
            return 8 * i;
    return 0;
}

void lzi_note_error(uint64_t row, const char *code) {
    if (row)
        grow(row + ERRORS_AT + place_of_code(code), 1);
}

void lzi_note_fallback(uint64_t row, const lzi_pending *said) {
    lzi_pool pool = {0};
    lzi_value error = {.type = LZI_NIL};
    const char *code = "BACKEND_ERROR"; /* of a worker that was gone before it took the call, or says nonsense */
    if (!row)
        return;
    if (said && !lzi_decode(&pool, said->body, said->nbytes, &error))
        code = lzi_get_text(&error, "code");
    grow(row + FALLBACKS_AT + place_of_code(code), 1);
    lzi_pool_free(&pool);
}
