/* bundles MODE RUNTIME_DIR LIBZMQ FILE...: what the tests of bundles do with liblayerzero. */
#include "layerzero.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(what)                                                                                                    \
    do {                                                                                                               \
        if (!(what)) {                                                                                                 \
            fprintf(stderr, "line %d: not so: %s\n%s\n", __LINE__, #what, error.message);                              \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

enum { MOST = 8, MAX_BYTES = 1 << 20 };
static lz_error error = {.struct_size = sizeof error};

/* Tensors as a bundle wants them, in memory of the client's. */
typedef struct made {
    lz_tensor inputs[MOST], outputs[MOST];
    lz_bundle_run_spec run;
} made;

static lz_tensor tensor_of(lz_client *client, const lz_bundle_tensor *told) {
    lz_tensor one = {.struct_size = sizeof one, .dtype = told->dtype, .ndim = told->ndim, .shape = told->shape};
    CHECK(lz_alloc(client, told->nbytes, &one.data, &error) == LZ_OK);
    memset(one.data, 0, told->nbytes);
    return one;
}

static void make(lz_client *client, const lz_bundle_info *info, made *to) {
    CHECK(info->input_count <= MOST && info->output_count <= MOST);
    for (size_t i = 0; i < info->input_count; i++)
        to->inputs[i] = tensor_of(client, &info->inputs[i]);
    for (size_t i = 0; i < info->output_count; i++)
        to->outputs[i] = tensor_of(client, &info->outputs[i]);
    to->run = (lz_bundle_run_spec){.struct_size = sizeof to->run,
                                   .inputs = to->inputs,
                                   .input_count = info->input_count,
                                   .outputs = to->outputs,
                                   .output_count = info->output_count,
                                   .timeout_s = 60};
}

static void drop(lz_client *client, const lz_bundle_info *info, made *to) {
    for (size_t i = 0; i < info->input_count; i++)
        lz_free(client, to->inputs[i].data, NULL);
    for (size_t i = 0; i < info->output_count; i++)
        lz_free(client, to->outputs[i].data, NULL);
}

/* Inputs from stdin, outputs to stdout, kernels and attempts to stderr; again and again while there are inputs. */
static void run(lz_client *client, const char *path) {
    lz_bundle *bundle = NULL;
    lz_bundle_report *report = NULL;
    made all;
    CHECK(lz_bundle_open(client, path, NULL, &bundle, &error) == LZ_OK);
    const lz_bundle_info *info = lz_bundle_about(bundle);
    CHECK(info->struct_size == sizeof *info && info->environment_count == 1 && *info->environments[0].env);
    fprintf(stderr, "%s", info->name);
    for (size_t i = 0; i < info->input_count; i++)
        fprintf(stderr, " %s", info->inputs[i].name);
    for (size_t i = 0; i < info->output_count; i++)
        fprintf(stderr, " %s", info->outputs[i].name);
    fprintf(stderr, " by %s\n", info->environments[0].backend);
    make(client, info, &all);
    while (fread(all.inputs[0].data, info->inputs[0].nbytes, 1, stdin)) {
        for (size_t i = 1; i < info->input_count; i++)
            CHECK(fread(all.inputs[i].data, info->inputs[i].nbytes, 1, stdin));
        CHECK(lz_bundle_run(bundle, &all.run, &report, &error) == LZ_OK && report->step_count == info->step_count);
        for (size_t i = 0; i < report->step_count; i++)
            fprintf(stderr, "%s/%zu ", report->steps[i]->kernel_id, report->steps[i]->attempt_count);
        fprintf(stderr, "\n");
        lz_bundle_report_free(report);
        for (size_t i = 0; i < info->output_count; i++)
            fwrite(all.outputs[i].data, info->outputs[i].nbytes, 1, stdout);
    }
    drop(client, info, &all);
    lz_bundle_close(bundle);
}

/* What opening each file says. */
static void open_all(lz_client *client, char **paths) {
    for (; *paths; paths++) {
        lz_bundle *bundle = NULL;
        lz_code code = lz_bundle_open(client, *paths, NULL, &bundle, &error);
        CHECK(!code == (bundle != NULL) && error.code == (int)code);
        printf("%s|%s\n", lz_code_name((int)code), strtok(error.message, "\n"));
        const char *why = strtok(NULL, "");
        printf("%s\n", why ? why : "");
        lz_bundle_close(bundle);
    }
}

/* Open any file, and run what is taken as a bundle, whatever comes of it. */
static void try_all(lz_client *client, char **paths) {
    lz_bundle_options any = {sizeof any, true};
    for (; *paths; paths++) {
        lz_bundle *bundle = NULL;
        lz_code code = lz_bundle_open(client, *paths, &any, &bundle, &error);
        puts(code ? lz_code_name((int)code) : "OK");
        const lz_bundle_info *info = bundle ? lz_bundle_about(bundle) : NULL;
        bool is_small = info && info->input_count <= MOST && info->output_count <= MOST && info->slot_bytes < MAX_BYTES;
        for (size_t i = 0; is_small && i < info->input_count + info->output_count; i++)
            is_small = (i < info->input_count ? &info->inputs[i] : &info->outputs[i - info->input_count])->nbytes <
                       MAX_BYTES;
        if (is_small) {
            lz_bundle_report *report = NULL;
            made all;
            make(client, info, &all);
            lz_bundle_run(bundle, &all.run, &report, &error);
            lz_bundle_report_free(report);
            drop(client, info, &all);
        }
        lz_bundle_close(bundle);
    }
}

static void say(const char *what, lz_code code) {
    printf("%s|%s|%s\n", what, lz_code_name((int)code), strtok(error.message, "\n"));
}

static void wrong(lz_client *client, const char *path) {
    lz_bundle *bundle = NULL;
    lz_bundle_options small = {.struct_size = 1};
    made all, other;
    say("no client", lz_bundle_open(NULL, path, NULL, &bundle, &error));
    say("no path", lz_bundle_open(client, NULL, NULL, &bundle, &error));
    say("options", lz_bundle_open(client, path, &small, &bundle, &error));
    CHECK(lz_bundle_open(client, path, NULL, &bundle, &error) == LZ_OK);
    const lz_bundle_info *info = lz_bundle_about(bundle);
    make(client, info, &all);
    say("no bundle", lz_bundle_run(NULL, &all.run, NULL, &error));
    say("no run", lz_bundle_run(bundle, NULL, NULL, &error));
    all.run.input_count--;
    say("count", lz_bundle_run(bundle, &all.run, NULL, &error));
    all.run.input_count++;
    other = all, other.run.inputs = other.inputs, other.inputs[1].shape = (int64_t[]){6, 3};
    say("shape", lz_bundle_run(bundle, &other.run, NULL, &error));
    other.inputs[1] = all.inputs[1], other.inputs[1].strides = (int64_t[]){1, 4};
    say("strides", lz_bundle_run(bundle, &other.run, NULL, &error));
    other.inputs[1] = all.inputs[1], other.inputs[1].dtype = LZ_INT32;
    say("dtype", lz_bundle_run(bundle, &other.run, NULL, &error));
    other.inputs[1] = all.inputs[1], other.inputs[1].data = &other;
    say("memory", lz_bundle_run(bundle, &other.run, NULL, &error));
    other.inputs[1] = all.inputs[1], other.run.outputs = other.outputs, other.outputs[0].data = all.inputs[0].data;
    say("overlap", lz_bundle_run(bundle, &other.run, NULL, &error));
    all.run.timeout_s = -1;
    say("time", lz_bundle_run(bundle, &all.run, NULL, &error));
    all.run.timeout_s = 60;
    CHECK(lz_bundle_run(bundle, &all.run, NULL, &error) == LZ_OK); /* after all this it goes on */
    drop(client, info, &all);
    lz_bundle_close(bundle);
    lz_bundle_close(NULL);
    lz_bundle_report_free(NULL);
}

/* Threads that share a bundle. */
typedef struct shared {
    lz_client *client;
    lz_bundle *bundle;
} shared;

static void *work(void *with) {
    shared *its = with;
    lz_error own = {.struct_size = sizeof own};
    made all;
    make(its->client, lz_bundle_about(its->bundle), &all);
    for (int i = 0; i < 10; i++)
        if (lz_bundle_run(its->bundle, &all.run, NULL, &own)) {
            fprintf(stderr, "a thread's run: %s\n", own.message);
            exit(1);
        }
    drop(its->client, lz_bundle_about(its->bundle), &all);
    return NULL;
}

static void threads(lz_client *client, const char *path) {
    shared its = {client, NULL};
    pthread_t running[4];
    CHECK(lz_bundle_open(client, path, NULL, &its.bundle, &error) == LZ_OK);
    for (int i = 0; i < 4; i++)
        pthread_create(&running[i], NULL, work, &its);
    for (int i = 0; i < 4; i++)
        pthread_join(running[i], NULL);
    lz_bundle_close(its.bundle);
}

int main(int argc, char **argv) {
    if (argc < 5 || lz_abi_version() != LZ_ABI_VERSION)
        return 2;
    lz_connect_options options = {.struct_size = sizeof options, .runtime_dir = argv[2], .libzmq = argv[3]};
    lz_client *client = NULL;
    CHECK(lz_connect(&options, &client, &error) == LZ_OK);
    if (!strcmp(argv[1], "run"))
        run(client, argv[4]);
    else if (!strcmp(argv[1], "open"))
        open_all(client, argv + 4);
    else if (!strcmp(argv[1], "try"))
        try_all(client, argv + 4);
    else if (!strcmp(argv[1], "wrong"))
        wrong(client, argv[4]), threads(client, argv[4]);
    lz_close(client);
    return 0;
}
