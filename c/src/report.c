#include "client.h"

#include <stdlib.h>
#include <string.h>

/* A report, and all the memory that it refers to. */
typedef struct kept_report {
    lz_report report; /* first: the caller's pointer is to it */
    lzi_pool pool;
} kept_report;

static void *items_of(lzi_pool *pool, const lzi_value *list, size_t nbytes, size_t *count) {
    *count = list && list->type == LZI_LIST ? list->count : 0;
    void *taken = *count ? lzi_take(pool, *count * nbytes) : NULL;
    if (!taken)
        *count = 0;
    return taken;
}

static void fill_candidates(kept_report *kept, const lzi_value *list) {
    lz_report *report = &kept->report;
    if (!list || list->type != LZI_LIST || !list->count)
        return;
    lz_candidate *candidates = items_of(&kept->pool, list, sizeof *candidates, &report->candidate_count);
    report->candidates = candidates;
    for (size_t i = 0; i < report->candidate_count; i++) {
        const lzi_value *one = &list->as.items[i], *accepted = lzi_get(one, "accepted"), *why = lzi_get(one, "reasons");
        lz_candidate *to = &candidates[i];
        *to = (lz_candidate){.struct_size = sizeof *to};
        to->kernel_id = lzi_get_text(one, "kernel_id");
        to->backend = lzi_get_text(one, "backend");
        to->is_accepted = accepted && accepted->type == LZI_BOOL && accepted->as.is_true;
        to->has_score = lzi_get_number(one, "score", &to->score);
        to->has_measured = lzi_get_number(one, "measured_us", &to->measured_us);
        lz_reason *reasons = items_of(&kept->pool, why, sizeof *reasons, &to->reason_count);
        to->reasons = reasons;
        for (size_t j = 0; j < to->reason_count; j++) {
            const lzi_value *reason = &why->as.items[j];
            reasons[j] = (lz_reason){sizeof *reasons, lzi_get_text(reason, "code"), lzi_get_text(reason, "detail"),
                                     lzi_get_text(reason, "repair")};
        }
    }
}

/* What was tried on a lane, before the broker had the call. */
static lz_attempt tried(kept_report *kept, const lzi_ending *ending) {
    lzi_value fields[LZI_MAX_FIELDS], error;
    const char *wrong = lzi_decode(&kept->pool, ending->why->data, ending->why->nbytes, &error);
    const char *name = wrong ? "BACKEND_ERROR" : lzi_get_text(&error, "code");
    lz_attempt made = {
        .struct_size = sizeof made,
        .backend = "",
        .kernel_id = "",
        .code = (int32_t)lzi_code_of(name),
        .exit_code = -1,
        .code_name = name,
        .detail = wrong ? "the worker's answer breaks the protocol" : lzi_get_text(&error, "message"),
        .phase = "express",
    };
    if (!lzi_decode_message(&kept->pool, &lzi_decision, ending->tried->bytes, ending->tried->nbytes, fields)) {
        made.kernel_id = fields[0].as.bytes;
        made.backend = fields[1].as.bytes;
        made.worker_pid = fields[2].type == LZI_INT ? fields[2].as.integer : 0;
    }
    return made;
}

static void fill_attempts(kept_report *kept, const lzi_ending *ending, const lzi_value *list) {
    lz_report *report = &kept->report;
    size_t count = list && list->type == LZI_LIST ? list->count : 0, before = ending->tried ? 1 : 0;
    lz_attempt *attempts = count + before ? lzi_take(&kept->pool, (count + before) * sizeof *attempts) : NULL;
    if (!attempts)
        return;
    report->attempts = attempts;
    report->attempt_count = count + before;
    if (before)
        *attempts++ = tried(kept, ending);
    for (size_t i = 0; i < count; i++) {
        const lzi_value *one = &list->as.items[i];
        attempts[i] = (lz_attempt){
            .struct_size = sizeof *attempts,
            .backend = lzi_get_text(one, "backend"),
            .kernel_id = lzi_get_text(one, "kernel_id"),
            .worker_pid = lzi_get_int(one, "worker_pid", 0),
            .code = (int32_t)lzi_code_of(lzi_get_text(one, "code")),
            .exit_signal = (int32_t)lzi_get_int(one, "exit_signal", 0),
            .exit_code = (int32_t)lzi_get_int(one, "exit_code", -1),
            .code_name = lzi_get_text(one, "code"),
            .detail = lzi_get_text(one, "detail"),
            .phase = lzi_get_text(one, "phase"),
        };
    }
}

static void fill_sizes(kept_report *kept, const void *result, size_t nbytes) {
    lzi_value value;
    if (!nbytes || lzi_decode(&kept->pool, result, nbytes, &value))
        return;
    const lzi_value *list = lzi_get(&value, "sizes");
    uint64_t *sizes = items_of(&kept->pool, list, sizeof *sizes, &kept->report.size_count);
    kept->report.sizes = sizes;
    for (size_t i = 0; i < kept->report.size_count; i++)
        sizes[i] = list->as.items[i].type == LZI_INT ? (uint64_t)list->as.items[i].as.integer : 0;
}

lz_report *lzi_report_of(const lzi_ending *ending) {
    const lzi_pending *answer = ending->answer;
    const lzi_value *attempts = NULL;
    lzi_value fields[LZI_MAX_FIELDS];
    kept_report *kept = calloc(1, sizeof *kept);
    if (!kept)
        return NULL;
    lz_report *report = &kept->report;
    bool is_done = answer->header.kind == LZI_DONE;
    *report = (lz_report){.struct_size = sizeof *report, .kernel_id = "", .backend = "", .path = ending->path};
    report->copied_bytes = ending->copied;
    if (is_done) {
        report->kernel_ns = answer->header.time;
        report->attempt = answer->header.attempt;
    }
    if (ending->told &&
        !lzi_decode_message(&kept->pool, &lzi_decision, ending->told->bytes, ending->told->nbytes, fields)) {
        fill_candidates(kept, &fields[5]);
        if (is_done) {
            report->kernel_id = fields[0].as.bytes;
            report->backend = fields[1].as.bytes;
            report->worker_pid = fields[2].type == LZI_INT ? fields[2].as.integer : 0;
        }
    }
    if (is_done && !(answer->header.flags & LZI_HAS_OUTCOME)) {
        fill_sizes(kept, answer->body, answer->nbytes);
    } else if (!lzi_decode_message(&kept->pool, &lzi_outcome, answer->body, answer->nbytes, fields)) {
        attempts = &fields[1];
        fill_candidates(kept, &fields[2]);
        fill_sizes(kept, fields[3].as.bytes, fields[3].count);
        report->waited_s = fields[4].as.number;
    }
    fill_attempts(kept, ending, attempts);
    return report;
}

void lz_report_free(lz_report *report) {
    kept_report *kept = (kept_report *)report;
    if (!kept)
        return;
    lzi_pool pool = kept->pool;
    free(kept);
    lzi_pool_free(&pool);
}
