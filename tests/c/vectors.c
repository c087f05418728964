/* Reads lines "message KIND HEX", "encode KIND HEX", "frame HEX", "refs COUNT HEX", "error HEX", "value HEX" or
 * "hmac KEY DATA" and answers each with a line: bytes in hex, fields of a header, or "refused WHY". */
#include "../../c/src/client.h"
#include "../../c/src/sha256.h"

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

int main(void) {
    static char line[1 << 18];
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = 0;
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
