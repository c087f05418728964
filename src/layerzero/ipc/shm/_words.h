/* Words of shared pages, and the clock that goes with them: for all that is compiled. */

#pragma once
#include <stdint.h>
#include <time.h>

static inline uint32_t load32(uint64_t at) { return __atomic_load_n((const uint32_t *)at, __ATOMIC_ACQUIRE); }
static inline uint64_t load64(uint64_t at) { return __atomic_load_n((const uint64_t *)at, __ATOMIC_ACQUIRE); }
static inline void store64(uint64_t at, uint64_t value) { __atomic_store_n((uint64_t *)at, value, __ATOMIC_RELEASE); }

static inline uint64_t clock_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}
