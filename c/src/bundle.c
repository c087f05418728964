#include "bundle_file.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_KERNELS = 1024 }; /* that a question may name */

struct lz_bundle {
    lz_client *client;
    pthread_mutex_t lock; /* of a run */
    lzi_bundle_file file;
    char *constants, *slots; /* `slots`: NULL after a run that failed, whose workers may still write to them */
};

/* What a run works with. */
typedef struct running {
    lz_bundle *bundle;
    lz_error *error;
    double timeout_s;
    lzi_tensor inputs[LZI_MAX_TENSORS], outputs[LZI_MAX_TENSORS];
    lz_report **reports; /* NULL: nobody wants them */
} running;

/* --- opening ------------------------------------------------------------------------------------------------------ */

/* The kernels of a bundle's steps, each once. NULL: there is no memory. */
static lzi_value *kernels_of(lzi_pool *pool, const lzi_bundle_file *file, uint32_t *count) {
    lzi_value *names = lzi_take(pool, file->info.step_count * sizeof *names);
    for (size_t i = 0; names && i < file->info.step_count; i++) {
        uint32_t at = 0;
        while (at < *count && !lzi_is_text(&names[at], file->steps[i].kernel))
            at++;
        if (at == *count && *count < MAX_KERNELS)
            names[(*count)++] = lzi_text(file->steps[i].kernel);
    }
    return names;
}

static const char *found_in(const lzi_value *map, const char *name, const char *field) {
    const lzi_value *value = map ? lzi_get(map, name) : NULL;
    return !field ? lzi_get_text(map, name) : value ? lzi_get_text(value, field) : "";
}

/* Compare environments and kernels with those of the broker, unless they may be any; kernels that it does not know are
 * not asked for. */
static lz_code check_locks(lz_client *client, const char *path, lzi_bundle_file *file, bool any_lock,
                           lz_error *error) {
    const lz_bundle_info *info = &file->info;
    lzi_pool pool = {0};
    lzi_pending answer = {0};
    lzi_value told = {.type = LZI_NIL};
    uint32_t kernel_count = 0;
    lzi_value *names = lzi_take(&pool, (info->environment_count + 1) * sizeof *names);
    lzi_value *kernels = kernels_of(&pool, file, &kernel_count);
    if (!names || !kernels) {
        lzi_pool_free(&pool);
        return lzi_fail(error, LZ_NO_MEMORY, "Free memory, then try again.\nThere is none for a question");
    }
    for (size_t i = 0; i < info->environment_count; i++)
        names[i] = lzi_text(info->environments[i].backend);
    lzi_value items[] = {
        lzi_text("backends"),
        {.type = LZI_LIST, .count = (uint32_t)info->environment_count, .as.items = names},
        lzi_text("kernels"),
        {.type = LZI_LIST, .count = kernel_count, .as.items = kernels},
    };
    lzi_value params = {.type = LZI_MAP, .count = 2, .as.items = items};
    pthread_mutex_lock(&client->lock);
    lz_code code = lzi_ask(client, "locks", &params, &answer, error);
    pthread_mutex_unlock(&client->lock);
    const char *wrong = code ? NULL : lzi_decode(&pool, answer.body, answer.nbytes, &told);
    if (wrong)
        code = lzi_fail(error, LZ_BAD_MESSAGE, "Report this: the broker broke the protocol.\nIts answer: %s", wrong);
    const lzi_value *locks = lzi_get(&told, "locks"), *owners = lzi_get(&told, "backends");
    for (size_t i = 0; !code && !any_lock && i < info->environment_count; i++) {
        const lz_bundle_environment *one = &info->environments[i];
        const char *here = found_in(locks, one->backend, "env");
        if (strcmp(here, one->env))
            code = lzi_fail(error, LZ_ENV_CHANGED,
                            "Have %s locked as the bundle has it (lz bundle show %s --lock %s), or set any_lock.\n"
                            "%s was written with its environment %s, here it is %s",
                            one->backend, path, one->backend, path, one->env, *here ? here : "not known");
    }
    for (size_t i = 0; !code && i < info->step_count; i++) {
        lzi_step *step = &file->steps[i];
        if (*found_in(owners, step->kernel, NULL))
            continue;
        if (!any_lock)
            code = lzi_fail(error, LZ_ENV_CHANGED,
                            "Write the bundle again, or set any_lock.\n%s needs %s, which is not here", path,
                            step->kernel);
        step->kernel = NULL;
    }
    free(answer.body);
    lzi_pool_free(&pool);
    return code;
}

lz_code lz_bundle_open(lz_client *client, const char *path, const lz_bundle_options *options, lz_bundle **bundle,
                       lz_error *error) {
    lz_bundle_options given = {0};
    lzi_clear(error);
    *bundle = NULL;
    if (!client)
        return lzi_fail(error, LZ_NOT_CONNECTED, "Connect first: lz_bundle_open needs a client of lz_connect");
    if (options && options->struct_size < offsetof(lz_bundle_options, any_lock) + sizeof given.any_lock)
        return lzi_fail(error, LZ_INVALID_ARGUMENT, "Set struct_size of lz_bundle_options to its sizeof; it is %zu",
                        options->struct_size);
    if (options)
        memcpy(&given, options, options->struct_size < sizeof given ? options->struct_size : sizeof given);
    lz_bundle *made = calloc(1, sizeof *made);
    if (!made)
        return lzi_fail(error, LZ_NO_MEMORY, "Free memory, then try again.\nThere is none for a bundle");
    made->client = client;
    pthread_mutex_init(&made->lock, NULL);
    int fd;
    void *constants = NULL;
    lz_code code = lzi_bundle_read(path, &fd, &made->file, error);
    const lz_bundle_info *info = &made->file.info;
    if (!code && info->constant_bytes)
        code = lzi_memory_take(&client->memory, info->constant_bytes, &constants, error);
    made->constants = constants;
    if (!code && info->constant_bytes)
        code = lzi_bundle_constants(path, fd, &made->file, made->constants, error);
    if (fd >= 0)
        close(fd);
    if (!code)
        code = check_locks(client, path, &made->file, given.any_lock, error);
    if (code)
        lz_bundle_close(made);
    else
        *bundle = made;
    return code;
}

static void give_back(lz_bundle *bundle, char **memory) {
    if (*memory)
        lzi_memory_give(&bundle->client->memory, *memory, NULL);
    *memory = NULL;
}

void lz_bundle_close(lz_bundle *bundle) {
    if (!bundle)
        return;
    give_back(bundle, &bundle->constants);
    give_back(bundle, &bundle->slots);
    lzi_pool_free(&bundle->file.pool);
    pthread_mutex_destroy(&bundle->lock);
    free(bundle);
}

const lz_bundle_info *lz_bundle_about(const lz_bundle *bundle) {
    return &bundle->file.info;
}

/* --- a run -------------------------------------------------------------------------------------------------------- */

static void unpin(running *now) {
    for (size_t i = 0; i < LZI_MAX_TENSORS; i++) {
        if (now->inputs[i].block)
            lzi_unpin(&now->bundle->client->memory, now->inputs[i].block);
        if (now->outputs[i].block)
            lzi_unpin(&now->bundle->client->memory, now->outputs[i].block);
    }
}

/* Check the caller's tensors, and keep their memory until the run has ended. */
static lz_code take(running *now, const lz_tensor *given, size_t count, const char *what,
                    const lz_bundle_tensor *wanted, size_t needed, lzi_tensor *to) {
    if (count != needed)
        return lzi_fail(now->error, LZ_INVALID_ARGUMENT, "Give the run %zu %ss, as lz_bundle_about tells; it has %zu",
                        needed, what, count);
    lz_code code = lzi_read_tensors(given, count, what, to, now->error);
    for (size_t i = 0; !code && i < count; i++) {
        lzi_tensor *one = &to[i];
        bool is_its = (int32_t)one->dtype == wanted[i].dtype && one->ndim == wanted[i].ndim;
        for (uint32_t j = 0; is_its && j < one->ndim; j++)
            is_its = one->shape[j] == wanted[i].shape[j];
        if (!is_its || !lzi_is_row_major(one))
            return lzi_fail(now->error, LZ_INVALID_ARGUMENT,
                            "Give %s %zu, %s, the dtype and shape that lz_bundle_about tells, in row-major order", what,
                            i, wanted[i].name);
        one->nbytes = wanted[i].nbytes;
        one->block = lzi_pin(&now->bundle->client->memory, one->data, one->nbytes, &one->ref);
        if (!one->block)
            return lzi_fail(now->error, LZ_INVALID_ARGUMENT,
                            "Put %s %zu, %s, into memory of lz_alloc: workers map no other. %p is in no such block, or "
                            "its %llu bytes pass the block's end",
                            what, i, wanted[i].name, (void *)one->data, (unsigned long long)one->nbytes);
    }
    return code;
}

static lz_code check_apart(const running *now) {
    const lz_bundle_info *info = &now->bundle->file.info;
    for (size_t i = 0; i < info->output_count; i++)
        for (size_t j = 0; j < info->input_count + i; j++) {
            bool is_input = j < info->input_count;
            const lzi_tensor *other = is_input ? &now->inputs[j] : &now->outputs[j - info->input_count];
            if (lzi_overlap(&now->outputs[i].ref, &other->ref))
                return lzi_fail(now->error, LZ_INVALID_ARGUMENT,
                                "Give output %zu, %s, memory of its own: it overlaps %s %zu", i, info->outputs[i].name,
                                is_input ? "input" : "output", is_input ? j : j - info->input_count);
        }
    return LZ_OK;
}

static void *address_of(const running *now, const lzi_place *place) {
    const lzi_home *home = &now->bundle->file.homes[place->home];
    char *begin = home->kind == LZI_HOME_INPUT    ? now->inputs[home->place].data
                  : home->kind == LZI_HOME_OUTPUT ? now->outputs[home->place].data
                  : home->kind == LZI_HOME_SLOT   ? now->bundle->slots + home->place
                                                  : now->bundle->constants + home->place;
    return begin + place->offset;
}

static void fill(const running *now, const lzi_place *const *places, uint32_t count, lz_tensor *to) {
    for (uint32_t i = 0; i < count; i++) {
        to[i] = (lz_tensor){.struct_size = sizeof *to};
        if (places[i]) {
            to[i] = places[i]->tensor;
            to[i].data = address_of(now, places[i]);
        }
    }
}

static lz_code run_step(running *now, size_t number) {
    const lzi_step *step = &now->bundle->file.steps[number];
    lz_tensor inputs[LZI_MAX_TENSORS], outputs[LZI_MAX_TENSORS];
    fill(now, step->inputs, step->input_count, inputs);
    fill(now, step->outputs, step->output_count, outputs);
    lz_call_spec call = {
        .struct_size = sizeof call,
        .op = step->op,
        .inputs = inputs,
        .input_count = step->input_count,
        .outputs = outputs,
        .output_count = step->output_count,
        .attrs = step->attrs,
        .attr_count = step->attr_count,
        .backend = step->is_pinned ? step->backend : NULL,
        .timeout_s = now->timeout_s,
    };
    lz_report **report = now->reports ? &now->reports[number] : NULL;
    lz_code code = lzi_call(now->bundle->client, &call, step->kernel, report, now->error);
    if (code)
        lzi_add_line(now->error, "In step %zu of the bundle, %s at %s", number, step->op, step->where);
    return code;
}

/* Outputs that lie in slots go to the caller's memory. */
static void copy_outputs(const running *now) {
    const lzi_bundle_file *file = &now->bundle->file;
    for (size_t i = 0; i < file->info.output_count; i++) {
        const lzi_place *place = file->outputs[i];
        lzi_tensor tensor;
        if (file->homes[place->home].kind == LZI_HOME_OUTPUT)
            continue;
        lzi_read_tensors(&place->tensor, 1, "tensor", &tensor, NULL);
        tensor.data = address_of(now, place);
        lzi_copy_dense(&tensor, now->outputs[i].data);
    }
}

static lz_code run_steps(running *now) {
    lz_bundle *bundle = now->bundle;
    const lz_bundle_info *info = &bundle->file.info;
    if (!bundle->slots && info->slot_bytes) {
        void *slots = NULL;
        lz_code code = lzi_memory_take(&bundle->client->memory, info->slot_bytes, &slots, now->error);
        if (code)
            return code;
        bundle->slots = slots;
    }
    for (size_t i = 0; i < info->step_count; i++) {
        lz_code code = run_step(now, i);
        if (code) {
            give_back(bundle, &bundle->slots);
            return code;
        }
    }
    copy_outputs(now);
    return LZ_OK;
}

static lz_bundle_report *report_of(const lz_bundle *bundle) {
    size_t count = bundle->file.info.step_count;
    lz_bundle_report *made = calloc(1, sizeof *made);
    lz_report **steps = calloc(count, sizeof *steps);
    if (!made || !steps) {
        free(made);
        free(steps);
        return NULL;
    }
    *made = (lz_bundle_report){sizeof *made, (const lz_report *const *)steps, count};
    return made;
}

lz_code lz_bundle_run(lz_bundle *bundle, const lz_bundle_run_spec *given, lz_bundle_report **report, lz_error *error) {
    lz_bundle_run_spec run = {0};
    lzi_clear(error);
    if (report)
        *report = NULL;
    if (!bundle)
        return lzi_fail(error, LZ_INVALID_ARGUMENT, "Open a bundle first: lz_bundle_run needs one");
    if (!given || given->struct_size < offsetof(lz_bundle_run_spec, timeout_s))
        return lzi_fail(error, LZ_INVALID_ARGUMENT, "Set struct_size of lz_bundle_run_spec to its sizeof; it is %zu",
                        given ? given->struct_size : 0);
    memcpy(&run, given, given->struct_size < sizeof run ? given->struct_size : sizeof run);
    running *now = calloc(1, sizeof *now);
    if (!now)
        return lzi_fail(error, LZ_NO_MEMORY, "Free memory, then try again.\nThere is none for a run");
    *now = (running){.bundle = bundle, .error = error, .timeout_s = run.timeout_s};
    const lz_bundle_info *info = &bundle->file.info;
    lz_code code = take(now, run.inputs, run.input_count, "input", info->inputs, info->input_count, now->inputs);
    if (!code)
        code = take(now, run.outputs, run.output_count, "output", info->outputs, info->output_count, now->outputs);
    if (!code)
        code = check_apart(now);
    if (!code && report) {
        *report = report_of(bundle);
        now->reports = *report ? (lz_report **)(uintptr_t)(*report)->steps : NULL;
    }
    if (!code) {
        pthread_mutex_lock(&bundle->lock);
        code = run_steps(now);
        pthread_mutex_unlock(&bundle->lock);
    }
    unpin(now);
    free(now);
    return code;
}

void lz_bundle_report_free(lz_bundle_report *report) {
    if (!report)
        return;
    lz_report **steps = (lz_report **)(uintptr_t)report->steps;
    for (size_t i = 0; i < report->step_count; i++)
        lz_report_free(steps[i]);
    free(steps);
    free(report);
}
