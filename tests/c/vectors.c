/* Reads lines "message KIND HEX", "encode KIND HEX", "frame HEX", "refs COUNT HEX", "error HEX", "value HEX",
 * "hmac KEY DATA" and of shared pages, which begin as zeros: "poke AT HEX" writes bytes there, "put CALL PLAN HEX",
 * "ended CALL STATUS NS PLAN" and "counter NS COPIED" do what a client or a worker does, "end CALL" reads the end of a
 * call, "page NBYTES" says what is not zero and begins anew. It answers each with a line: bytes in hex, fields of a
 * header, or "refused WHY". */
#include "../../c/src/client.h"
#include "../../c/src/sha256.h"
#include "../../src/layerzero/ipc/shm/_counters.h"
#include "../../src/layerzero/ipc/shm/_lane.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint8_t *of_hex(const char *text, size_t *nbytes) {
    *nbytes = strlen(text) / 2;
    uint8_t *data = malloc(*nbytes ? *nbytes : 1); /* exactly: the sanitizer sees one byte too many */
    for (size_t i = 0; i < *nbytes; i++)
        data[i] = (uint8_t)strtoul((char[]){text[2 * i], text[2 * i + 1], 0}, NULL, 16);
    return data;
}

static void say(const lzi_bytes *bytes) {
    for (size_t i = 0; i < bytes->nbytes; i++)
        printf("%02x", bytes->data[i]);
    printf("\n");
}

static _Alignas(64) uint8_t shared[1 << 18];

/* Of pages; false for what is another line. */
static bool is_of_page(const char *line) {
    uint64_t page = (uint64_t)(uintptr_t)shared, call, plan, status, ns;
    char text[4096] = "";
    size_t nbytes;
    End end;
    if (sscanf(line, "poke %llu %4095s", (unsigned long long *)&call, text) == 2) {
        uint8_t *data = of_hex(text, &nbytes);
        memcpy(shared + call, data, nbytes);
        free(data);
    } else if (sscanf(line, "put %llu %llu %4095s", (unsigned long long *)&call, (unsigned long long *)&plan, text) >=
               2) {
        uint8_t *data = of_hex(text, &nbytes);
        put_call(page, call, plan, (const char *)data, nbytes);
        free(data);
    } else if (sscanf(line, "ended %llu %llu %llu %llu", (unsigned long long *)&call, (unsigned long long *)&status,
                      (unsigned long long *)&ns, (unsigned long long *)&plan) == 4) {
        put_end(page, call, status, plan, ns);
    } else if (sscanf(line, "counter %llu %llu", (unsigned long long *)&ns, (unsigned long long *)&call) == 2) {
        count_calls(page + COUNTER_ROW_BYTES, ns, call, 1);
    } else if (sscanf(line, "end %llu", (unsigned long long *)&call) == 1) {
        int has_ended = get_end(page, call, &end);
        if (has_ended > 0) {
            printf("%llu %llu ", (unsigned long long)end.status, (unsigned long long)end.kernel_ns);
            for (uint64_t i = 0; i < end.nbytes; i++)
                printf("%02x", shared[place_of(page, call) - page + SAID_AT + i]);
            printf("\n");
            return true;
        }
        printf(has_ended ? "refused an end that makes no sense\n" : "none\n");
        return true;
    } else if (sscanf(line, "page %zu", &nbytes) == 1) {
        static const uint8_t ZEROS[8];
        bool is_in_run = false;
        const char *between = "";
        for (size_t at = 0; at < nbytes && at < sizeof shared; at += 8) {
            bool is_zero = !memcmp(shared + at, ZEROS, 8);
            if (!is_zero && !is_in_run)
                printf("%s%zu:", between, at), between = " ";
            for (size_t i = 0; !is_zero && i < 8; i++)
                printf("%02x", shared[at + i]);
            is_in_run = !is_zero;
        }
        printf("\n");
        memset(shared, 0, sizeof shared);
        return true;
    } else {
        return false;
    }
    printf("done\n");
    return true;
}

int main(void) {
    static char line[1 << 18];
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = 0;
        if (is_of_page(line))
            continue;
        const char *what = strtok(line, " "), *first = strtok(NULL, " "), *second = strtok(NULL, " ");
        size_t nbytes, key_bytes;
        uint8_t *data = of_hex(second ? second : first ? first : "", &nbytes);
        lzi_pool pool = {0};
        lzi_bytes out = {0};
        lzi_value value, fields[LZI_MAX_FIELDS];
        lzi_header header;
        const char *wrong = NULL;
        if (!strcmp(what, "message")) {
            const lzi_message *message = lzi_message_named(first);
            wrong = lzi_decode_message(&pool, message, second ? data : NULL, second ? nbytes : 0, fields);
            if (!wrong)
                lzi_encode_message(&out, message, fields);
        } else if (!strcmp(what, "encode")) { /* a map of fields alone, as the message with this kind */
            const lzi_message *message = lzi_message_named(first);
            wrong = lzi_decode(&pool, data, nbytes, &value);
            for (size_t i = 0; !wrong && i < LZI_MAX_FIELDS && message->fields[i].name; i++) {
                const lzi_value *found = lzi_get(&value, message->fields[i].name);
                fields[i] = found ? *found : (lzi_value){.type = message->fields[i].type, .as.bytes = ""};
            }
            if (!wrong)
                lzi_encode_message(&out, message, fields);
        } else if (!strcmp(what, "frame")) {
            wrong = lzi_read_header(data, nbytes, &header);
            if (!wrong) {
                printf("%u %u %u %llu %u %u %llu ", header.kind, header.flags, header.route,
                       (unsigned long long)header.seq, header.attempt, header.aux, (unsigned long long)header.time);
                lzi_put_header(&out, header);
                lzi_put(&out, data + LZI_HEADER_BYTES, nbytes - LZI_HEADER_BYTES);
            }
        } else if (!strcmp(what, "refs")) {
            lzi_ref ref;
            for (size_t i = 0; lzi_read_ref(data, nbytes, i, &ref) && i < strtoul(first, NULL, 10); i++) {
                printf("%u,%u,%llu,%llu ", ref.arena, ref.flags, (unsigned long long)ref.offset,
                       (unsigned long long)ref.nbytes);
                lzi_put_ref(&out, ref);
            }
        } else if (!strcmp(what, "error")) {
            lz_error error = {.struct_size = sizeof error};
            wrong = lzi_decode(&pool, data, nbytes, &value);
            if (!wrong) {
                lzi_fail_as(&error, &value);
                char *advice = strtok(error.message, "\n"), *message = strtok(NULL, "\n");
                printf("%s|%d|%s|%s|%u ", lz_code_name(error.code), error.retry, advice, message, error.needed_count);
                lzi_put_value(&out, &value);
            }
        } else if (!strcmp(what, "value")) {
            wrong = lzi_decode(&pool, data, nbytes, &value);
            if (!wrong)
                lzi_put_value(&out, &value);
        } else if (!strcmp(what, "hmac")) {
            uint8_t *key = of_hex(first, &key_bytes), mac[LZI_SHA256_BYTES];
            lzi_hmac_sha256(key, key_bytes, data, second ? nbytes : 0, mac);
            lzi_put(&out, mac, sizeof mac);
            free(key);
        }
        if (wrong)
            printf("refused %s\n", wrong);
        else
            say(&out);
        free(data);
        lzi_bytes_free(&out);
        lzi_pool_free(&pool);
    }
    return 0;
}
