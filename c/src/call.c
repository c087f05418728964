#include "sha256.h"
#include "tensors.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MAX_ATTRS = 64, BUSY_NS = 1000000 };
static const double PREFER_BONUS = 5000; /* as lz.compile's */

/* What a call is made of. */
typedef struct call {
    lz_client *client;
    const char *op, *backend, *prefer; /* `prefer`: a kernel, NULL for none */
    size_t input_count, output_count, attr_count;
    const char *attrs; /* the caller's array, checked */
    size_t attr_size;
    uint64_t timeout_us, start_ns;
    size_t copied;
    bool has_digest, is_after_lane;  /* `is_after_lane`: its worker died with it on a lane ... */
    uint32_t after_lane, after_call; /* ... in this call of that */
    uint8_t digest[LZI_SHA256_BYTES];
    lzi_bytes why;                 /* the error of an attempt on a lane ... */
    lzi_told *tried;               /* ... and whose that was; NULL: there was none */
    void *copies[LZI_MAX_TENSORS]; /* of inputs */
    lzi_tensor *outputs;           /* of all tensors, those behind the inputs */
    lzi_tensor inputs[];
} call;

static uint64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

/* --- reading what the caller gave --------------------------------------------------------------------------------- */

static lz_attr attr_of(const call *made, size_t index) {
    lz_attr one = {0};
    memcpy(&one, made->attrs + index * made->attr_size, made->attr_size < sizeof one ? made->attr_size : sizeof one);
    return one;
}

static bool is_text(const char *text) {
    return text && lzi_is_utf8(text, strlen(text));
}

static lz_code read_attrs(call *made, const lz_attr *attrs, lz_error *error) {
    if (made->attr_count > MAX_ATTRS || (made->attr_count && !attrs))
        return lzi_fail(error, LZ_INVALID_ARGUMENT, "Give a call at most %d attributes, as an array; it has %zu",
                        MAX_ATTRS, made->attr_count);
    made->attrs = (const char *)attrs;
    made->attr_size = made->attr_count ? attrs->struct_size : 0;
    for (size_t i = 0; i < made->attr_count; i++) {
        size_t size;
        memcpy(&size, made->attrs + i * made->attr_size, sizeof size);
        if (size != made->attr_size || size < offsetof(lz_attr, text) + sizeof attrs->text)
            return lzi_fail(error, LZ_INVALID_ARGUMENT,
                            "Set struct_size of every lz_attr to its sizeof; of attribute %zu "
                            "it is %zu",
                            i, size);
        lz_attr one = attr_of(made, i);
        if (!is_text(one.name))
            return lzi_fail(error, LZ_INVALID_ARGUMENT, "Give attribute %zu a name in UTF-8", i);
        if (one.type < LZ_ATTR_NONE || one.type > LZ_ATTR_TEXT)
            return lzi_fail(error, LZ_INVALID_ARGUMENT, "Give attribute %s a type of lz_attr_type; it has %d", one.name,
                            one.type);
        if (one.type == LZ_ATTR_TEXT && !is_text(one.text))
            return lzi_fail(error, LZ_INVALID_ARGUMENT, "Give attribute %s a text in UTF-8", one.name);
    }
    return LZ_OK;
}

static lz_code read_spec(const lz_call_spec *given, lz_call_spec *spec, lz_error *error) {
    if (!given || given->struct_size < offsetof(lz_call_spec, backend))
        return lzi_fail(error, LZ_INVALID_ARGUMENT, "Set struct_size of lz_call_spec to its sizeof; it is %zu",
                        given ? given->struct_size : 0);
    memcpy(spec, given, given->struct_size < sizeof *spec ? given->struct_size : sizeof *spec);
    if (!is_text(spec->op) || !*spec->op)
        return lzi_fail(error, LZ_INVALID_ARGUMENT, "Name the op of the call");
    if (spec->backend && !is_text(spec->backend))
        return lzi_fail(error, LZ_INVALID_ARGUMENT, "Name the backend in UTF-8, or give NULL");
    if (isnan(spec->timeout_s) || spec->timeout_s < 0)
        return lzi_fail(error, LZ_INVALID_ARGUMENT, "Give timeout_s in seconds, or 0 for the broker's own; it is %g",
                        spec->timeout_s);
    lz_code code = lzi_check_count(spec->input_count, spec->inputs, "input", error);
    return code ? code : lzi_check_count(spec->output_count, spec->outputs, "output", error);
}

static lz_code read_call(call *made, const lz_call_spec *given, lz_error *error) {
    lz_call_spec spec = *given;
    made->outputs = made->inputs + spec.input_count;
    made->op = spec.op;
    made->backend = spec.backend ? spec.backend : "";
    made->timeout_us = spec.timeout_s > 0 ? (uint64_t)(1e6 * fmin(fmax(spec.timeout_s, 1e-3), 86400.0)) : 0;
    made->input_count = spec.input_count;
    made->output_count = spec.output_count;
    made->attr_count = spec.attr_count;
    lz_code code = read_attrs(made, spec.attrs, error);
    if (!code)
        code = lzi_read_tensors(spec.inputs, spec.input_count, "input", made->inputs, error);
    if (!code)
        code = lzi_read_tensors(spec.outputs, spec.output_count, "output", made->outputs, error);
    for (size_t i = 0; !code && i < made->output_count; i++)
        if (made->outputs[i].dtype == LZ_NO_TENSOR)
            code = lzi_fail(error, LZ_INVALID_ARGUMENT, "Give every output a tensor; output %zu is left out", i);
    return code;
}

/* --- memory ------------------------------------------------------------------------------------------------------- */

static size_t tensor_count(const call *made) {
    return made->input_count + made->output_count;
}

static lz_code pin(call *made, lzi_tensor *tensor, const char *what, size_t index, lz_error *error) {
    tensor->ref = (lzi_ref){LZI_NO_ARENA, 0, 0, 0};
    if (tensor->dtype == LZ_NO_TENSOR)
        return LZ_OK;
    tensor->block = lzi_pin(&made->client->memory, tensor->data, tensor->nbytes, &tensor->ref);
    return tensor->block ? LZ_OK
                         : lzi_fail(error, LZ_INVALID_ARGUMENT,
                                    "Put %s %zu into memory of lz_alloc: workers map "
                                    "no other. %p is in no such block, or its %llu bytes pass the block's end",
                                    what, index, (void *)tensor->data, (unsigned long long)tensor->nbytes);
}

static void unpin(call *made) {
    for (size_t i = 0; i < tensor_count(made); i++) {
        if (made->inputs[i].block)
            lzi_unpin(&made->client->memory, made->inputs[i].block);
        made->inputs[i].block = NULL;
    }
}

bool lzi_overlap(const lzi_ref *one, const lzi_ref *other) {
    return one->arena == other->arena && one->offset < other->offset + other->nbytes &&
           other->offset < one->offset + one->nbytes;
}

/* Ops that write in place, by output and the input that it is. */
static const struct {
    const char *op;
    size_t output, input;
} IN_PLACE[] = {{"append_kv", 0, 2}, {"append_kv", 1, 3}, {"copy_kv_blocks", 0, 0}, {"copy_kv_blocks", 1, 1}};

static bool is_in_place(const char *op, size_t output, size_t input) {
    for (size_t i = 0; i < sizeof IN_PLACE / sizeof *IN_PLACE; i++)
        if (!strcmp(IN_PLACE[i].op, op) && IN_PLACE[i].output == output && IN_PLACE[i].input == input)
            return true;
    return false;
}

static bool is_same_memory(const lzi_tensor *one, const lzi_tensor *other) {
    return !memcmp(&one->ref, &other->ref, sizeof one->ref) && one->dtype == other->dtype && one->ndim == other->ndim &&
           !memcmp(one->shape, other->shape, sizeof one->shape) &&
           !memcmp(one->strides, other->strides, sizeof one->strides);
}

static lz_code pin_all(call *made, lz_error *error) {
    lz_code code = LZ_OK;
    for (size_t i = 0; !code && i < made->input_count; i++)
        code = pin(made, &made->inputs[i], "input", i, error);
    for (size_t i = 0; !code && i < made->output_count; i++)
        code = pin(made, &made->outputs[i], "output", i, error);
    for (size_t i = 0; !code && i < made->output_count; i++) {
        const lzi_tensor *output = &made->outputs[i];
        for (size_t j = 0; !code && j < made->input_count + i; j++) {
            bool is_input = j < made->input_count;
            const lzi_tensor *other = is_input ? &made->inputs[j] : &made->outputs[j - made->input_count];
            bool is_allowed = is_input && is_in_place(made->op, i, j) && is_same_memory(output, other);
            if (!is_allowed && lzi_overlap(&output->ref, &other->ref))
                code = lzi_fail(error, LZ_INVALID_ARGUMENT, "Give output %zu memory of its own: it overlaps %s %zu", i,
                                is_input ? "input" : "output", is_input ? j : j - made->input_count);
        }
    }
    if (code)
        unpin(made);
    return code;
}

/* Copy the inputs that are not row-major into memory that is. `has_changed`: there were some. */
static lz_code make_contiguous(call *made, bool *has_changed, lz_error *error) {
    *has_changed = false;
    for (size_t i = 0; i < made->input_count; i++) {
        lzi_tensor *input = &made->inputs[i];
        if (input->dtype == LZ_NO_TENSOR || lzi_is_row_major(input))
            continue;
        for (size_t j = 0; j < made->output_count; j++)
            if (lzi_overlap(&input->ref, &made->outputs[j].ref))
                return LZ_OK; /* an op that writes in place: a copy would not be the caller's memory */
        uint64_t nbytes = lzi_dense_bytes(input);
        void *copy;
        lz_code code = lzi_memory_take(&made->client->memory, nbytes, &copy, error);
        if (code)
            return code;
        lzi_copy_dense(input, copy);
        lzi_block *before = input->block;
        int64_t dense = 1;
        for (uint32_t k = input->ndim; k-- > 0; dense *= input->shape[k])
            input->strides[k] = dense;
        input->data = copy;
        input->nbytes = nbytes;
        made->copies[i] = copy;
        made->copied += nbytes;
        input->block = lzi_pin(&made->client->memory, copy, nbytes, &input->ref);
        lzi_unpin(&made->client->memory, before);
        *has_changed = true;
    }
    return LZ_OK;
}

static void add_to_hash(void *with, const void *data, size_t nbytes) {
    lzi_sha256_add(with, data, nbytes);
}

/* Of the inputs' elements, in row-major order; a call has it in the first bytes. */
static void take_digest(call *made) {
    lzi_sha256 hash;
    lzi_sha256_begin(&hash);
    for (size_t i = 0; i < made->input_count; i++)
        lzi_each_piece(&made->inputs[i], add_to_hash, &hash);
    lzi_sha256_end(&hash, made->digest);
    made->has_digest = true;
}

/* --- frames ------------------------------------------------------------------------------------------------------- */

/* What is asked of selection: to prefer a kernel above measured times, and below what the broker's policy prefers. */
static void put_policy(lzi_bytes *out, const char *prefer) {
    if (!prefer) {
        lzi_put_map(out, 0);
        return;
    }
    lzi_put_map(out, 1);
    lzi_put_text(out, "layers");
    lzi_put_list(out, 1);
    lzi_put_map(out, 2);
    lzi_put_text(out, "origin");
    lzi_put_text(out, "a bundle");
    lzi_put_text(out, "values");
    lzi_put_map(out, 1);
    lzi_put_text(out, "rules");
    lzi_put_list(out, 1);
    lzi_put_map(out, 2);
    lzi_put_text(out, "prefer");
    lzi_put_list(out, 1);
    lzi_put_text(out, prefer);
    lzi_put_text(out, "bonus");
    lzi_put_float(out, PREFER_BONUS);
}

static void put_route(lzi_bytes *out, const call *made) {
    lzi_put_map(out, 9);
    lzi_put_text(out, "kind");
    lzi_put_text(out, lzi_route.kind);
    lzi_put_text(out, "op");
    lzi_put_text(out, made->op);
    lzi_put_text(out, "inputs");
    lzi_put_list(out, (uint32_t)made->input_count);
    for (size_t i = 0; i < made->input_count; i++)
        lzi_put_spec(out, &made->inputs[i]);
    lzi_put_text(out, "outputs");
    lzi_put_list(out, (uint32_t)made->output_count);
    for (size_t i = 0; i < made->output_count; i++)
        lzi_put_spec(out, &made->outputs[i]);
    lzi_put_text(out, "attrs");
    lzi_put_map(out, (uint32_t)made->attr_count);
    for (size_t i = 0; i < made->attr_count; i++) {
        lz_attr one = attr_of(made, i);
        lzi_put_text(out, one.name);
        if (one.type == LZ_ATTR_BOOL)
            lzi_put_bool(out, one.is_true);
        else if (one.type == LZ_ATTR_INT)
            lzi_put_int(out, one.integer);
        else if (one.type == LZ_ATTR_FLOAT)
            lzi_put_float(out, one.number);
        else if (one.type == LZ_ATTR_TEXT)
            lzi_put_text(out, one.text);
        else
            lzi_put_nil(out);
    }
    lzi_put_text(out, "backend");
    lzi_put_text(out, made->backend);
    lzi_put_text(out, "policy");
    put_policy(out, made->prefer);
    lzi_put_text(out, "next_ops");
    lzi_put_list(out, 0);
    lzi_put_text(out, "device");
    lzi_put_text(out, "");
}

static void put_refs(lzi_bytes *out, const call *made) {
    for (size_t i = 0; i < tensor_count(made); i++)
        lzi_put_ref(out, made->inputs[i].ref);
}

static void put_execute(lzi_bytes *out, const call *made, uint32_t route, const lzi_bytes *refs) {
    lzi_header header = {.protocol = LZI_PROTOCOL, .kind = LZI_EXECUTE, .route = route, .time = made->timeout_us};
    header.seq = made->client->last_seq + 1;
    header.flags = made->has_digest ? LZI_HAS_DIGEST : 0;
    if (made->is_after_lane) {
        header.flags |= LZI_AFTER_LANE;
        header.aux = made->after_lane;
        header.attempt = made->after_call;
    }
    lzi_put_header(out, header);
    lzi_put(out, refs->data, refs->nbytes);
    if (made->has_digest)
        lzi_put(out, made->digest, LZI_DIGEST_BYTES);
}

/* The memory stays as it is until RELEASED. Where there is no memory for a record it stays so until lz_close. */
static void keep_lent(call *made, uint64_t seq) {
    lzi_lent *lent = malloc(sizeof *lent + 2 * LZI_MAX_TENSORS * sizeof *lent->blocks);
    size_t count = 0;
    for (size_t i = 0; i < tensor_count(made); i++) {
        if (lent && made->inputs[i].block)
            lent->blocks[count++] = made->inputs[i].block;
        made->inputs[i].block = NULL;
    }
    if (!lent)
        return;
    lent->seq = seq;
    lent->count = count;
    lent->next = made->client->lent;
    made->client->lent = lent;
}

/* Tell the broker which inputs have ended two workers. */
static void say_poisoned(call *made, uint32_t route) {
    lzi_bytes frame = {0};
    if (!made->has_digest)
        take_digest(made);
    lzi_put_header(&frame, (lzi_header){.protocol = LZI_PROTOCOL, .kind = LZI_POISONED, .route = route});
    lzi_put(&frame, made->digest, LZI_DIGEST_BYTES);
    lzi_send(made->client, &frame, NULL);
    lzi_bytes_free(&frame);
}

/* The broker leaves it to a client to count that, which might have called again with other memory. */
static void count_unreachable(const call *made, const lzi_value *attempts) {
    bool is_list = attempts->type == LZI_LIST && attempts->count;
    const char *kernel_id = is_list ? lzi_get_text(&attempts->as.items[attempts->count - 1], "kernel_id") : "";
    if (*kernel_id)
        lzi_note_error(lzi_counter_row(made->client, made->op, kernel_id, "broker"), "UNREACHABLE");
}

/* What an answer says, and what follows from it for the call's memory. */
static lz_code read_answer(call *made, const lzi_pending *answer, uint32_t route, lz_error *error) {
    lzi_value fields[LZI_MAX_FIELDS];
    lzi_pool pool = {0};
    if (answer->header.kind == LZI_DONE)
        return LZ_OK;
    if (answer->header.kind == LZI_FAILED && answer->header.flags & LZI_STILL_LENT)
        keep_lent(made, answer->seq);
    const char *wrong = answer->header.kind != LZI_FAILED
                            ? "an answer of another kind than calls have"
                            : lzi_decode_message(&pool, &lzi_outcome, answer->body, answer->nbytes, fields);
    lz_code code =
        wrong ? lzi_fail(error, LZ_BAD_MESSAGE, "Report this: the broker broke the protocol.\nIt sent %s", wrong)
              : lzi_fail_as(error, &fields[0]);
    if (code == LZ_UNREACHABLE)
        count_unreachable(made, &fields[1]);
    lzi_pool_free(&pool);
    if (code == LZ_POISON && !made->has_digest && !(answer->header.flags & LZI_STILL_LENT))
        say_poisoned(made, route);
    return code;
}

/* Nobody says any more what becomes of the memory: it is left alone. */
static void leave_memory(call *made) {
    for (size_t i = 0; i < tensor_count(made); i++)
        made->inputs[i].block = NULL;
}

static void report_on(const call *made, const lzi_pending *answer, const char *path, const lzi_told *told,
                      lz_report **report) {
    lzi_ending ending = {answer, path, told, made->copied, made->tried, &made->why};
    if (!report)
        return;
    lz_report_free(*report);
    *report = lzi_report_of(&ending);
}

/* Of an attempt on a lane that the broker has not seen. */
static void keep_attempt(call *made, lzi_way way, lzi_passage *passage) {
    lzi_bytes_free(&made->why);
    lzi_told_drop(made->tried);
    made->tried = passage->told;
    passage->told = NULL;
    if (way == LZI_RAISED) {
        lzi_put(&made->why, passage->answer.body, passage->answer.nbytes);
        return;
    }
    lzi_put_map(&made->why, 2);
    lzi_put_text(&made->why, "code");
    lzi_put_text(&made->why, "BACKEND_ERROR");
    lzi_put_text(&made->why, "message");
    lzi_put_text(&made->why, "the worker was gone before it took the call from its lane");
}

/* Send the call to the broker. One that was on a lane waits for room, for its timeout at most: it may have begun. */
static lz_code submit(call *made, uint32_t number, const lzi_bytes *refs, lzi_pending *answer, lz_error *error) {
    lz_client *client = made->client;
    double timeout_s = made->timeout_us ? 1e-6 * (double)made->timeout_us : client->welcome.timeout_s;
    uint64_t due_ns = now_ns() + (uint64_t)(1e9 * timeout_s);
    while (true) {
        lzi_bytes frame = {0};
        put_execute(&frame, made, number, refs);
        lz_code code = lzi_submit(client, &frame, answer, error);
        lzi_bytes_free(&frame);
        if (code != LZ_BUSY || !(made->is_after_lane || made->tried) || now_ns() >= due_ns)
            return code;
        pthread_mutex_unlock(&client->lock);
        nanosleep(&(struct timespec){0, BUSY_NS}, NULL);
        pthread_mutex_lock(&client->lock);
        lzi_hear_hang_up(client);
        lzi_clear(error);
    }
}

/* Send the call to the broker, and wait for its answer. */
static lz_code by_broker(call *made, uint32_t number, const lzi_bytes *refs, lz_report **report, lz_error *error) {
    lz_client *client = made->client;
    lzi_pending answer = {0};
    lz_code code = submit(made, number, refs, &answer, error);
    if (code) {
        if (made->tried)
            report_on(made, &answer, "broker", NULL, report);
        return code;
    }
    code = lzi_wait(client, &answer, error);
    if (code)
        leave_memory(made);
    else
        code = read_answer(made, &answer, number, error);
    lzi_told *told = lzi_told_keep(lzi_route_numbered(client, number)->told);
    if (!code && made->copied)
        lzi_note_copied(lzi_told_row(client, made->op, told, "broker"), made->copied);
    if (answer.body)
        report_on(made, &answer, "broker", told, report);
    lzi_told_drop(told);
    free(answer.body);
    return code;
}

/* Make the call once: by its lane, if its route has one, else by the broker. */
static lz_code exchange(call *made, lz_report **report, lz_error *error) {
    lz_client *client = made->client;
    lzi_bytes body = {0}, refs = {0};
    lzi_known_route *route = NULL;
    put_route(&body, made);
    put_refs(&refs, made);
    pthread_mutex_lock(&client->lock);
    lz_code code = lzi_find_route(client, &body, &route, error);
    if (!code) {
        uint32_t number = route->number;
        lzi_passage passage = {made->op, &refs, .timeout_us = made->timeout_us, .start_ns = made->start_ns};
        passage.copied = made->copied;
        route->open_calls++;
        lzi_way way = made->has_digest ? LZI_BY_BROKER : lzi_lane_run(client, route, &passage);
        if (way == LZI_RAISED || way == LZI_NOT_TAKEN)
            keep_attempt(made, way, &passage);
        if (way == LZI_AFTER) {
            made->is_after_lane = true;
            made->after_lane = passage.lane;
            made->after_call = passage.call;
        }
        if (way == LZI_RAN) {
            report_on(made, &passage.answer, "express", passage.told, report);
        } else if (way == LZI_GONE) {
            code = lzi_say_lost(client, error);
            leave_memory(made);
        } else {
            code = by_broker(made, number, &refs, report, error);
        }
        free(passage.answer.body);
        lzi_told_drop(passage.told);
        lzi_route_numbered(client, number)->open_calls--; /* it may have moved */
    }
    pthread_mutex_unlock(&client->lock);
    lzi_bytes_free(&body);
    lzi_bytes_free(&refs);
    return code;
}

lz_code lz_call(lz_client *client, const lz_call_spec *given, lz_report **report, lz_error *error) {
    return lzi_call(client, given, NULL, report, error);
}

lz_code lzi_call(lz_client *client, const lz_call_spec *given, const char *prefer, lz_report **report,
                 lz_error *error) {
    lzi_clear(error);
    if (report)
        *report = NULL;
    if (!client)
        return lzi_fail(error, LZ_NOT_CONNECTED, "Connect first: lz_call needs a client of lz_connect");
    lz_call_spec spec = {0};
    lz_code code = read_spec(given, &spec, error);
    if (code)
        return code;
    call *made = malloc(sizeof *made + (spec.input_count + spec.output_count) * sizeof *made->inputs);
    if (!made)
        return lzi_fail(error, LZ_NO_MEMORY, "Free memory, then try again.\nThere is none for a call");
    *made = (call){.client = client, .prefer = prefer, .start_ns = now_ns()};
    code = read_call(made, &spec, error);
    if (!code)
        code = pin_all(made, error);
    if (!code) {
        code = exchange(made, report, error);
        bool has_changed = true;
        for (unsigned again = 0; again < 3; again++) {
            if (code == LZ_DIGEST_REQUIRED && !made->has_digest) {
                take_digest(made);
            } else if (code == LZ_ADAPTATION_REQUIRED && has_changed) {
                lz_code failed = make_contiguous(made, &has_changed, error);
                if (failed || !has_changed) {
                    code = failed ? failed : code;
                    break;
                }
            } else {
                break;
            }
            if (code == LZ_ADAPTATION_REQUIRED) /* that one has been told */
                made->is_after_lane = false;
            lzi_clear(error);
            code = exchange(made, report, error);
        }
        unpin(made);
        for (size_t i = 0; i < LZI_MAX_TENSORS; i++)
            if (made->copies[i])
                lzi_memory_give(&client->memory, made->copies[i], NULL);
    }
    pthread_mutex_lock(&client->lock);
    lzi_told_drop(made->tried);
    pthread_mutex_unlock(&client->lock);
    lzi_bytes_free(&made->why);
    free(made);
    return code;
}
