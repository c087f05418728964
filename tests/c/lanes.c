/* lanes RUNTIME_DIR LIBZMQ: does what lines on stdin say, and answers each with one on stdout. A call is silu of eight
 * numbers in so many dimensions, whose first is FIRST.
 *
 *   call NDIM FIRST TIMEOUT_S BACKEND   its code, path, backend, kernel and attempts; BACKEND "-": any
 *   settle NDIM                         calls until one is on a lane; the answer is that one's
 *   free NDIM                           gives its memory back: what becomes of it is the library's affair
 *   threads COUNT CALLS                 so many threads with memory of their own; how many calls were on a lane
 *   time NDIM CALLS                     the least of that many calls' ns
 *   begin NDIM FIRST BACKEND            a call in a thread of its own, as `call`
 *   end                                 waits for that one: as `call`
 *   few                                 from now on this process gets no more descriptors
 *   many                                it does again
 *   left                                descriptors and threads of this process, and mapped lanes
 *   again                               closes the client, and connects again */
#include "layerzero.h"

#include <dirent.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

enum { COUNT = 8, MOST_DIMENSIONS = 8 };

static lz_connect_options options = {.struct_size = sizeof options};
static lz_client *client;

typedef struct memory {
    float *x, *y;
} memory;

static bool is_there(memory *of) {
    void *x = of->x, *y = of->y;
    if (!x && (lz_alloc(client, COUNT * sizeof(float), &x, NULL) || lz_alloc(client, COUNT * sizeof(float), &y, NULL)))
        return false;
    of->x = x, of->y = y;
    return true;
}

static lz_code silu(memory *of, int ndim, float first, double timeout_s, const char *backend, lz_report **report,
                    lz_error *error) {
    int64_t shape[MOST_DIMENSIONS];
    for (int i = 0; i < ndim; i++)
        shape[i] = i == ndim - 1 ? COUNT : 1;
    for (int i = 0; i < COUNT; i++)
        of->x[i] = i ? (float)i / 2 - 2 : first, of->y[i] = NAN;
    lz_tensor in = {
        .struct_size = sizeof in, .dtype = LZ_FLOAT32, .ndim = (uint32_t)ndim, .shape = shape, .data = of->x};
    lz_tensor out = in;
    out.data = of->y;
    lz_call_spec call = {.struct_size = sizeof call,
                         .op = "silu",
                         .inputs = &in,
                         .input_count = 1,
                         .outputs = &out,
                         .output_count = 1,
                         .timeout_s = timeout_s,
                         .backend = backend};
    return lz_call(client, &call, report, error);
}

static bool is_right(const memory *of) {
    for (int i = 0; i < COUNT; i++)
        if (!(fabs(of->y[i] - of->x[i] / (1 + exp(-(double)of->x[i]))) <= 1e-5 * (1 + fabs(of->x[i]))))
            return false;
    return true;
}

static void say(lz_code code, const memory *of, const lz_report *report, const lz_error *error) {
    const char *found = code ? strtok((char *)(uintptr_t)error->message, "\n") : is_right(of) ? "right" : "WRONG";
    printf("%s|%s|", lz_code_name((int)code), found ? found : "");
    if (report) {
        printf("%s|%s|%s|%u", report->path, report->backend, report->kernel_id, report->attempt);
        for (size_t i = 0; i < report->attempt_count; i++) {
            const lz_attempt *one = &report->attempts[i];
            printf("|%s,%s,%d,%d,%s,%lld", one->backend, one->code_name, one->exit_signal, one->exit_code, one->phase,
                   (long long)one->worker_pid);
        }
    }
    printf("\n");
}

/* A call of a thread beside. */
typedef struct beside {
    pthread_t thread;
    memory of;
    int ndim;
    float first;
    char backend[64];
    lz_code code;
    lz_report *report;
    lz_error error;
} beside;

static void *call_beside(void *with) {
    beside *its = with;
    its->code = silu(&its->of, its->ndim, its->first, 0, strcmp(its->backend, "-") ? its->backend : NULL, &its->report,
                     &its->error);
    return NULL;
}

static void *work(void *with) {
    long *counts = with; /* calls to make; on return: of those on a lane, -1 after a wrong one */
    long on_lane = 0;
    memory own = {0};
    for (long i = 0; i < counts[0]; i++) {
        lz_error error = {.struct_size = sizeof error};
        lz_report *report = NULL;
        if (!is_there(&own) || silu(&own, 1, (float)(i % 13) / 8 - 3, 0, NULL, &report, &error) || !is_right(&own)) {
            fprintf(stderr, "a thread's call: %s\n", error.message);
            on_lane = -1;
        }
        on_lane += on_lane >= 0 && report && !strcmp(report->path, "express");
        lz_report_free(report);
    }
    lz_free(client, own.x, NULL);
    lz_free(client, own.y, NULL);
    counts[0] = on_lane;
    return NULL;
}

static void threads(int count, long calls) {
    pthread_t running[64];
    long counts[64], sum = 0;
    bool are_right = true;
    for (int i = 0; i < count; i++) {
        counts[i] = calls;
        pthread_create(&running[i], NULL, work, &counts[i]);
    }
    for (int i = 0; i < count; i++) {
        pthread_join(running[i], NULL);
        are_right &= counts[i] >= 0;
        sum += counts[i];
    }
    printf("%s %ld\n", are_right ? "right" : "WRONG", sum);
}

static int entries(const char *path) {
    int count = 0;
    DIR *folder = opendir(path);
    while (readdir(folder))
        count++;
    closedir(folder);
    return count;
}

static int mapped(const char *what) {
    char line[512];
    int count = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (fgets(line, sizeof line, maps))
        count += strstr(line, what) != NULL;
    fclose(maps);
    return count;
}

static void allow(bool are_few) {
    struct rlimit limit;
    int least_free = dup(0);
    close(least_free);
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = are_few ? (rlim_t)least_free : limit.rlim_max;
    printf("%d\n", setrlimit(RLIMIT_NOFILE, &limit));
}

static int64_t least_ns(memory *of, int ndim, long calls) {
    int64_t least = INT64_MAX;
    for (long i = 0; i < calls; i++) {
        struct timespec from, to;
        clock_gettime(CLOCK_MONOTONIC, &from);
        if (silu(of, ndim, 1, 0, NULL, NULL, NULL))
            return -1;
        clock_gettime(CLOCK_MONOTONIC, &to);
        int64_t ns = (to.tv_sec - from.tv_sec) * 1000000000 + to.tv_nsec - from.tv_nsec;
        least = ns < least ? ns : least;
    }
    return least;
}

static bool connected(lz_error *error) {
    if (!lz_connect(&options, &client, error))
        return true;
    printf("%s|%s\n", lz_code_name(error->code), error->message);
    return false;
}

int main(int argc, char **argv) {
    char line[256], backend[64];
    memory of[MOST_DIMENSIONS + 1] = {0};
    static beside other = {.error = {.struct_size = sizeof other.error}};
    lz_error error = {.struct_size = sizeof error};
    int ndim;
    long calls;
    float first;
    double timeout_s;
    if (argc < 3)
        return 2;
    setvbuf(stdout, NULL, _IOLBF, 0);
    options.runtime_dir = argv[1];
    options.libzmq = argv[2];
    if (!connected(&error))
        return 0;
    while (fgets(line, sizeof line, stdin)) {
        lz_report *report = NULL;
        if (sscanf(line, "call %d %f %lf %63s", &ndim, &first, &timeout_s, backend) == 4 && is_there(&of[ndim])) {
            const char *named = strcmp(backend, "-") ? backend : NULL;
            lz_code code = silu(&of[ndim], ndim, first, timeout_s, named, &report, &error);
            say(code, &of[ndim], report, &error);
        } else if (sscanf(line, "settle %d", &ndim) == 1 && is_there(&of[ndim])) {
            lz_code code;
            do {
                lz_report_free(report);
                code = silu(&of[ndim], ndim, 1, 0, NULL, &report, &error);
            } while (!code && is_right(&of[ndim]) && strcmp(report->path, "express"));
            say(code, &of[ndim], report, &error);
        } else if (sscanf(line, "begin %d %f %63s", &other.ndim, &other.first, other.backend) == 3 &&
                   is_there(&other.of)) {
            printf("%d\n", pthread_create(&other.thread, NULL, call_beside, &other));
        } else if (!strncmp(line, "end", 3)) {
            pthread_join(other.thread, NULL);
            say(other.code, &other.of, other.report, &other.error);
            lz_report_free(other.report);
        } else if (!strncmp(line, "few", 3) || !strncmp(line, "many", 4)) {
            allow(*line == 'f');
        } else if (sscanf(line, "free %d", &ndim) == 1) {
            lz_code code = lz_free(client, of[ndim].x, &error);
            printf("%s\n", lz_code_name((int)(code ? code : lz_free(client, of[ndim].y, &error))));
            of[ndim] = (memory){0};
        } else if (sscanf(line, "threads %d %ld", &ndim, &calls) == 2) {
            threads(ndim, calls);
        } else if (sscanf(line, "time %d %ld", &ndim, &calls) == 2 && is_there(&of[ndim])) {
            printf("%lld\n", (long long)least_ns(&of[ndim], ndim, calls));
        } else if (!strncmp(line, "left", 4)) {
            printf("%d %d %d\n", entries("/proc/self/fd"), entries("/proc/self/task"), mapped("memfd:lz-lane"));
        } else if (!strncmp(line, "again", 5)) {
            lz_close(client);
            memset(of, 0, sizeof of);
            printf("%d %d\n", entries("/proc/self/fd"), mapped("memfd:"));
            if (!connected(&error))
                return 0;
        }
        lz_report_free(report);
    }
    lz_close(client);
    return 0;
}
