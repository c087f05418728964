/* Rows of a page of counters in C, as ipc/shm/counter_page.py has them: for whatever is compiled that passes the broker by. A row is named
   by its address. Whoever counts has a lock of its own, so plain additions do; each word is written whole, as the broker reads it. */

#pragma once
#include <stdint.h>

enum { COUNTER_ROW_BYTES = 1024, BUCKETS_AT = 256, BUCKETS = 26, SUM_AT = BUCKETS_AT + 8 * BUCKETS, COPIED_AT = SUM_AT + 8 };
#define COUNTER_LAYOUT COUNTER_ROW_BYTES, BUCKETS_AT, BUCKETS, SUM_AT, COPIED_AT

static inline void grow(uint64_t at, uint64_t by) {
    uint64_t *word = (uint64_t *)at;
    __atomic_store_n(word, __atomic_load_n(word, __ATOMIC_RELAXED) + by, __ATOMIC_RELAXED);
}

/* So many calls that ended well after so many ns each; row 0: they are not counted. */
static inline void count_calls(uint64_t row, uint64_t ns, uint64_t copied_bytes, uint64_t times) {
    if (!row) return;
    uint64_t us = (ns + 999) / 1000, bucket = us < 2 ? 0 : 64 - (uint64_t)__builtin_clzll(us - 1);
    grow(row + BUCKETS_AT + 8 * (bucket < BUCKETS ? bucket : BUCKETS - 1), times);
    grow(row + SUM_AT, ns * times);
    if (copied_bytes) grow(row + COPIED_AT, copied_bytes);
}
