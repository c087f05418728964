/* fuzz SEED COUNT: reads lines of hex, and lets the decoders have random bytes and changed copies of these lines. What
 * decodes must encode to what decodes to the same. The sanitizers judge the rest. */
#include "../../c/src/client.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 1024, ROOM = 2048 };
static const char *const KINDS[] = {"hello",      "challenge",    "proof",         "welcome",      "redirect",
                                    "refused",    "add_arena",    "arena_added",   "retire_arena", "route",
                                    "request",    "decision",     "lease",         "outcome",      "add_lane",
                                    "lane_added", "add_counters", "counters_added"};
static uint64_t state;

static uint64_t drawn(uint64_t below) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state % below;
}

static void check(const uint8_t *data, size_t nbytes) {
    lzi_pool pool = {0};
    lzi_value value, again, fields[LZI_MAX_FIELDS];
    lzi_header header;
    lzi_bytes once = {0}, twice = {0};
    if (!lzi_decode(&pool, data, nbytes, &value)) {
        lzi_put_value(&once, &value);
        if (lzi_decode(&pool, once.data, once.nbytes, &again))
            abort();
        lzi_put_value(&twice, &again);
        if (once.nbytes != twice.nbytes || memcmp(once.data, twice.data, once.nbytes))
            abort();
        lz_error error = {.struct_size = drawn(2) ? sizeof error : offsetof(lz_error, message) + drawn(80)};
        lzi_fail_as(&error, &value);
        for (size_t i = 0; i < sizeof KINDS / sizeof *KINDS; i++)
            if (!lzi_read_message(lzi_message_named(KINDS[i]), &value, fields)) {
                lzi_bytes message = {0};
                lzi_encode_message(&message, lzi_message_named(KINDS[i]), fields);
                if (lzi_decode_message(&pool, lzi_message_named(KINDS[i]), message.data, message.nbytes, fields))
                    abort();
                lzi_bytes_free(&message);
            }
    }
    lzi_read_header(data, nbytes, &header);
    for (unsigned flags = 0; flags < 4; flags++) {
        lzi_pending answer = {.body = (uint8_t *)data, .nbytes = nbytes};
        answer.header.kind = flags & 1 ? LZI_DONE : LZI_FAILED;
        answer.header.flags = flags & 2 ? LZI_HAS_OUTCOME : 0;
        lzi_told *told = lzi_tell(1, data, nbytes);
        lzi_bytes why = {.data = (uint8_t *)data, .nbytes = nbytes};
        lzi_ending ending = {&answer, "broker", told, 0, flags & 1 ? told : NULL, &why};
        lz_report *report = lzi_report_of(&ending);
        for (size_t i = 0; i < report->candidate_count; i++)
            state += strlen(report->candidates[i].kernel_id) + report->candidates[i].reason_count;
        for (size_t i = 0; i < report->attempt_count; i++)
            state += strlen(report->attempts[i].detail);
        state += !state; /* no more numbers would come of 0 */
        lz_report_free(report);
        lzi_told_drop(told);
    }
    lzi_known_route route = {.told = lzi_tell(1, data, nbytes)};
    lzi_lease_take(&route, 1, data, nbytes);
    lzi_lease_free(route.lease);
    lzi_told_drop(route.told);
    lzi_bytes_free(&once);
    lzi_bytes_free(&twice);
    lzi_pool_free(&pool);
}

int main(int argc, char **argv) {
    static char line[1 << 16];
    static uint8_t samples[256][MOST];
    size_t sizes[256], count = 0;
    if (argc != 3)
        return 2;
    state = strtoull(argv[1], NULL, 10) * 2654435761u + 1;
    while (count < 256 && fgets(line, sizeof line, stdin)) {
        size_t nbytes = strcspn(line, "\n") / 2;
        if (nbytes > MOST)
            continue;
        for (size_t i = 0; i < nbytes; i++)
            samples[count][i] = (uint8_t)strtoul((char[]){line[2 * i], line[2 * i + 1], 0}, NULL, 16);
        sizes[count++] = nbytes;
    }
    for (unsigned long run = strtoul(argv[2], NULL, 10); run; run--) {
        uint8_t bytes[ROOM];
        size_t nbytes = drawn(200), from = drawn(count);
        for (size_t i = 0; i < nbytes; i++)
            bytes[i] = (uint8_t)drawn(256);
        if (drawn(8)) {
            nbytes = sizes[from];
            memcpy(bytes, samples[from], nbytes);
        }
        for (uint64_t changes = drawn(5); changes && nbytes; changes--) {
            size_t at = drawn(nbytes), length = drawn(nbytes - at) + 1;
            switch (drawn(5)) {
            case 0:
                bytes[at] = (uint8_t)drawn(256);
                break;
            case 1:
                bytes[at] ^= (uint8_t)(1u << drawn(8));
                break;
            case 2: /* a head that claims a lot */
                bytes[at] = (uint8_t)(0xC4 + drawn(28));
                break;
            case 3:
                nbytes = at;
                break;
            default:
                if (nbytes + length <= ROOM) {
                    memmove(bytes + at + length, bytes + at, nbytes - at);
                    nbytes += length;
                }
            }
        }
        uint8_t *exact = malloc(nbytes ? nbytes : 1);
        memcpy(exact, bytes, nbytes);
        check(exact, nbytes);
        free(exact);
    }
    return 0;
}
