/* c_api RUNTIME_DIR LIBZMQ BUNDLE: reads lines "WHAT COUNT", makes that many calls, and answers with the least and the
 * middle of their ns and the path of one more, "-" where there is none. WHAT: null; silu, of four floats; bundle, a run
 * of it; floor, two processes that ring each other by eventfds. */
#include "layerzero.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 100000 };

static lz_error error = {.struct_size = sizeof error};
static lz_client *client;
static lz_bundle *bundle;
static lz_tensor in[64], out[64];
static int there, back;

static void check(lz_code code) {
    if (code) {
        fprintf(stderr, "%s: %s\n", lz_code_name((int)code), error.message);
        exit(1);
    }
}

static void *taken(size_t nbytes) {
    void *data;
    check(lz_alloc(client, nbytes, &data, &error));
    memset(data, 0, nbytes);
    return data;
}

static lz_report *call(const char *op, size_t count, bool is_reported) {
    static int64_t shape[] = {4};
    static lz_tensor x = {.struct_size = sizeof x, .dtype = LZ_FLOAT32, .ndim = 1, .shape = shape}, y;
    lz_report *report = NULL;
    if (!x.data) {
        x.data = taken(4 * sizeof(float));
        y = x;
        y.data = taken(4 * sizeof(float));
    }
    lz_call_spec spec = {
        .struct_size = sizeof spec, .op = op, .inputs = &x, .input_count = count, .outputs = &y, .output_count = count};
    check(lz_call(client, &spec, is_reported ? &report : NULL, &error));
    return report;
}

static void run_bundle(lz_bundle_report **report) {
    const lz_bundle_info *info = lz_bundle_about(bundle);
    lz_bundle_run_spec run = {.struct_size = sizeof run,
                              .inputs = in,
                              .input_count = info->input_count,
                              .outputs = out,
                              .output_count = info->output_count};
    check(lz_bundle_run(bundle, &run, report, &error));
}

static void fill(const lz_bundle_tensor *about, size_t count, lz_tensor *to) {
    for (size_t i = 0; i < count; i++)
        to[i] = (lz_tensor){.struct_size = sizeof *to,
                            .dtype = about[i].dtype,
                            .ndim = about[i].ndim,
                            .shape = about[i].shape,
                            .data = taken(about[i].nbytes)};
}

static void make(const char *what) {
    eventfd_t rings;
    if (!strcmp(what, "null"))
        call("null", 0, false);
    else if (!strcmp(what, "silu"))
        call("silu", 1, false);
    else if (!strcmp(what, "bundle"))
        run_bundle(NULL);
    else if (eventfd_write(there, 1) || eventfd_read(back, &rings))
        exit(1);
}

static void say_path(const char *what) {
    lz_bundle_report *steps = NULL;
    lz_report *report = NULL;
    const char *path = "-";
    if (!strcmp(what, "bundle"))
        run_bundle(&steps);
    else if (strcmp(what, "floor"))
        report = call(what, strcmp(what, "null") != 0, true);
    if (report)
        path = report->path;
    for (size_t i = 0; steps && i < steps->step_count; i++) /* the longer way, if one took it */
        path = i && !strcmp(path, "broker") ? path : steps->steps[i]->path;
    printf(" %s\n", path);
    lz_bundle_report_free(steps);
    lz_report_free(report);
}

static int by_size(const void *one, const void *other) {
    int64_t a = *(const int64_t *)one, b = *(const int64_t *)other;
    return (a > b) - (a < b);
}

int main(int argc, char **argv) {
    static int64_t times[MOST];
    lz_connect_options options = {.struct_size = sizeof options};
    char line[64], what[32];
    long count;
    if (argc < 4)
        return 2;
    setvbuf(stdout, NULL, _IOLBF, 0);
    there = eventfd(0, 0), back = eventfd(0, 0);
    pid_t child = fork();
    for (eventfd_t rings; !child;) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (eventfd_read(there, &rings) || eventfd_write(back, 1))
            return 1;
    }
    options.runtime_dir = argv[1], options.libzmq = argv[2];
    check(lz_connect(&options, &client, &error));
    check(lz_bundle_open(client, argv[3], NULL, &bundle, &error));
    fill(lz_bundle_about(bundle)->inputs, lz_bundle_about(bundle)->input_count, in);
    fill(lz_bundle_about(bundle)->outputs, lz_bundle_about(bundle)->output_count, out);
    while (fgets(line, sizeof line, stdin) && sscanf(line, "%31s %ld", what, &count) == 2 && count <= MOST) {
        for (long i = 0; i < count; i++) {
            struct timespec from, to;
            clock_gettime(CLOCK_MONOTONIC, &from);
            make(what);
            clock_gettime(CLOCK_MONOTONIC, &to);
            times[i] = (to.tv_sec - from.tv_sec) * 1000000000 + to.tv_nsec - from.tv_nsec;
        }
        qsort(times, (size_t)count, sizeof *times, by_size);
        printf("%lld %lld", (long long)times[0], (long long)times[count / 2]);
        say_path(what);
    }
    lz_bundle_close(bundle);
    lz_close(client);
    kill(child, SIGKILL);
    return 0;
}
