#include "free_memory.h"

#include "client.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char MARGIN[] = "LAYERZERO_MEMORY_MARGIN_MIB";
static const uint64_t MAX_MARGIN_BYTES = (uint64_t)256 << 20;
static const uint64_t MARGIN_SHARE = 16;             /* a small container keeps less free: this part of its limit */
static const uint64_t UNLIMITED = (uint64_t)1 << 60; /* version 1 of control groups writes a number for no limit */
enum { PATH_BYTES = 4096 };

/* The number that a file of the kernel's has; false where it does not exist, or says "max". */
static bool read_number(const char *folder, const char *name, uint64_t *number) {
    char path[PATH_BYTES + 64];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "re");
    bool has_number = file && fscanf(file, "%" SCNu64, number) == 1;
    if (file)
        fclose(file);
    return has_number;
}

/* Sum of the lines of a file, "name number", that have one of these names. */
static uint64_t read_lines(const char *path, const char *const *names, uint64_t unit) {
    char line[256], name[128];
    uint64_t number, sum = 0;
    FILE *file = fopen(path, "re");
    while (file && fgets(line, sizeof line, file)) {
        if (sscanf(line, "%127s %" SCNu64, name, &number) != 2)
            continue;
        for (const char *const *one = names; *one; one++)
            if (!strcmp(name, *one))
                sum += number * unit;
    }
    if (file)
        fclose(file);
    return sum;
}

static lz_code check_bound(uint64_t nbytes, uint64_t total, uint64_t available, const char *what, const uint64_t *given,
                           lz_error *error) {
    uint64_t share = total / MARGIN_SHARE, margin = given                      ? *given
                                                    : share < MAX_MARGIN_BYTES ? share
                                                                               : MAX_MARGIN_BYTES;
    if (nbytes <= available && margin <= available - nbytes)
        return LZ_OK;
    return lzi_fail(error, LZ_NO_MEMORY,
                    "Free memory, or ask for less.\n%" PRIu64 " bytes of shared memory are asked for, "
                    "and %s has %" PRIu64 " available, of which %" PRIu64 " stay free (%s)",
                    nbytes, what, available, margin, MARGIN);
}

/* A control group's limit, and what it could give back: page cache, which shared memory is no part of, and slabs. */
static lz_code check_group(const char *folder, bool is_first, uint64_t nbytes, const uint64_t *margin,
                           lz_error *error) {
    static const char *const OWN[] = {"active_file", "inactive_file", "slab_reclaimable", NULL};
    static const char *const TOTALS[] = {"total_active_file", "total_inactive_file", NULL};
    char path[PATH_BYTES + 64], what[200];
    uint64_t total, used;
    if (!read_number(folder, is_first ? "memory.limit_in_bytes" : "memory.max", &total) || total >= UNLIMITED ||
        !read_number(folder, is_first ? "memory.usage_in_bytes" : "memory.current", &used))
        return LZ_OK;
    snprintf(path, sizeof path, "%s/memory.stat", folder);
    snprintf(what, sizeof what, "control group %.180s", folder);
    uint64_t available = (total > used ? total - used : 0) + read_lines(path, is_first ? TOTALS : OWN, 1);
    return check_bound(nbytes, total, available < total ? available : total, what, margin, error);
}

/* Each group that binds this process, inner first; what of them is visible counts. */
static lz_code check_groups(uint64_t nbytes, const uint64_t *margin, lz_error *error) {
    char line[PATH_BYTES], folder[PATH_BYTES + 32];
    lz_code code = LZ_OK;
    FILE *file = fopen("/proc/self/cgroup", "re");
    while (!code && file && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        char *controllers = strchr(line, ':'), *path = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!path)
            continue;
        *controllers++ = 0;
        *path++ = 0;
        bool is_first = *controllers; /* version 1 has a tree for each controller */
        if (is_first && strcmp(controllers, "memory"))
            continue;
        int top = snprintf(folder, sizeof folder, "/sys/fs/cgroup%s", is_first ? "/memory" : "");
        snprintf(folder + top, sizeof folder - (size_t)top, "%s", strcmp(path, "/") ? path : "");
        while (!code) {
            code = check_group(folder, is_first, nbytes, margin, error);
            char *last = strrchr(folder + top, '/');
            if (!last)
                break;
            *last = 0;
        }
    }
    if (file)
        fclose(file);
    return code;
}

lz_code lzi_check_free(uint64_t nbytes, lz_error *error) {
    static const char *const TOTAL[] = {"MemTotal:", NULL}, *const AVAILABLE[] = {"MemAvailable:", NULL};
    const char *given = getenv(MARGIN);
    uint64_t margin = 0, total = read_lines("/proc/meminfo", TOTAL, 1024);
    if (given && *given) {
        if (strspn(given, "0123456789") != strlen(given) || strlen(given) > 9)
            return lzi_fail(error, LZ_CONFIG,
                            "Set %s to the MiB that stay free, such as 512; 0 for none.\nIt is '%.40s'", MARGIN, given);
        margin = strtoull(given, NULL, 10) << 20;
    }
    const uint64_t *margin_given = given && *given ? &margin : NULL;
    lz_code code = LZ_OK;
    if (total)
        code = check_bound(nbytes, total, read_lines("/proc/meminfo", AVAILABLE, 1024), "the machine", margin_given,
                           error);
    return code ? code : check_groups(nbytes, margin_given, error);
}
