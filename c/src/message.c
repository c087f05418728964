#include "message.h"

#include <string.h>

#define INT_(name) {name, LZI_INT, false, NULL}
#define TEXT_(name) {name, LZI_TEXT, false, NULL}
#define TEXT_OR_NONE(name) {name, LZI_TEXT, true, NULL}
#define BYTES_(name) {name, LZI_BYTES, false, NULL}
#define BYTES_OR_NONE(name) {name, LZI_BYTES, true, NULL}
#define LIST_(name) {name, LZI_LIST, false, NULL}
#define LIST_OR_NONE(name) {name, LZI_LIST, true, NULL}
#define MAP_(name) {name, LZI_MAP, false, NULL}
#define MAP_OR_NONE(name) {name, LZI_MAP, true, NULL}
#define BOOL_(name) {name, LZI_BOOL, false, NULL}
#define BOOL_OR_FALSE(name) {name, LZI_BOOL, true, NULL}
#define FLOAT_(name) {name, LZI_FLOAT, false, NULL}
#define FLOAT_OR_0(name) {name, LZI_FLOAT, true, NULL}

const lzi_message lzi_hello = {"hello",
                               {LIST_("protocols"), TEXT_("role"), TEXT_("package"), INT_("pid"),
                                BYTES_OR_NONE("ticket"), BYTES_OR_NONE("nonce"), TEXT_OR_NONE("backend"),
                                TEXT_OR_NONE("env"), TEXT_OR_NONE("source")}};
const lzi_message lzi_challenge = {"challenge", {BYTES_("nonce")}};
const lzi_message lzi_proof = {"proof", {BYTES_("mac")}};
const lzi_message lzi_welcome = {"welcome",
                                 {INT_("protocol"), TEXT_("package"), TEXT_("broker"), INT_("broker_pid"),
                                  TEXT_("endpoint"), BYTES_("identity"), INT_("number"), INT_("max_in_flight"),
                                  FLOAT_("timeout_s"), BYTES_OR_NONE("mac"), BOOL_OR_FALSE("has_joined"),
                                  BOOL_OR_FALSE("counts")}};
const lzi_message lzi_redirect = {"redirect", {TEXT_("path"), BYTES_OR_NONE("mac")}};
const lzi_message lzi_refused = {"refused", {MAP_("error")}};
const lzi_message lzi_add_arena = {"add_arena", {INT_("arena"), INT_("nbytes")}};
const lzi_message lzi_arena_added = {"arena_added", {INT_("arena")}};
const lzi_message lzi_retire_arena = {"retire_arena", {INT_("arena")}};
const lzi_message lzi_add_lane = {"add_lane", {INT_("lane"), TEXT_OR_NONE("gpu")}};
const lzi_message lzi_lane_added = {"lane_added", {INT_("lane"), BOOL_("is_open")}};
const lzi_message lzi_add_counters = {"add_counters", {{NULL, LZI_NIL, false, NULL}}};
const lzi_message lzi_counters_added = {"counters_added", {{NULL, LZI_NIL, false, NULL}}};
const lzi_message lzi_route = {"route",
                               {TEXT_("op"), LIST_("inputs"), LIST_("outputs"), MAP_("attrs"), TEXT_OR_NONE("backend"),
                                MAP_OR_NONE("policy"), LIST_OR_NONE("next_ops"), TEXT_OR_NONE("device")}};
const lzi_message lzi_request = {"request", {TEXT_("method"), MAP_OR_NONE("params")}};
const lzi_message lzi_decision = {"decision",
                                  {TEXT_("kernel_id"),
                                   TEXT_("backend"),
                                   INT_("worker_pid"),
                                   BOOL_("copies_inputs"),
                                   BOOL_("copies_outputs"),
                                   LIST_("candidates"),
                                   {"lane", LZI_TEXT, true, "broker"},
                                   FLOAT_OR_0("shadow_rate"),
                                   BOOL_OR_FALSE("offers_samples"),
                                   {"slot", LZI_INT, true, NULL},
                                   LIST_OR_NONE("shadowed"),
                                   FLOAT_OR_0("traced")}};
const lzi_message lzi_lease_message = {"lease",
                                       {INT_("lane"), INT_("plan"), INT_("epoch"), LIST_OR_NONE("neighbours")}};
const lzi_message lzi_outcome = {"outcome",
                                 {MAP_OR_NONE("error"), LIST_OR_NONE("attempts"), LIST_OR_NONE("candidates"),
                                  BYTES_OR_NONE("result"), FLOAT_OR_0("waited_s")}};

static const lzi_message *const ALL[] = {
    &lzi_hello,          &lzi_challenge,   &lzi_proof,        &lzi_welcome,  &lzi_redirect,      &lzi_refused,
    &lzi_add_arena,      &lzi_arena_added, &lzi_retire_arena, &lzi_add_lane, &lzi_lane_added,    &lzi_add_counters,
    &lzi_counters_added, &lzi_route,       &lzi_request,      &lzi_decision, &lzi_lease_message, &lzi_outcome,
};

const lzi_message *lzi_message_named(const char *kind) {
    for (size_t i = 0; i < sizeof ALL / sizeof *ALL; i++)
        if (!strcmp(ALL[i]->kind, kind))
            return ALL[i];
    return NULL;
}

const char *lzi_read_message(const lzi_message *message, const lzi_value *value, lzi_value fields[LZI_MAX_FIELDS]) {
    if (value->type != LZI_MAP)
        return "a message must be a map";
    if (!lzi_is_text(lzi_get(value, "kind"), message->kind))
        return "a message of a kind that is not expected here";
    for (size_t i = 0; i < LZI_MAX_FIELDS && message->fields[i].name; i++) {
        const lzi_field *field = &message->fields[i];
        const lzi_value *found = lzi_get(value, field->name);
        if (!found) {
            if (!field->has_default)
                return "a message that lacks a field";
            fields[i] = (lzi_value){.type = field->type};
            if (field->type == LZI_TEXT || field->type == LZI_BYTES)
                fields[i] = lzi_text(field->default_text ? field->default_text : "");
            fields[i].type = field->type;
            continue;
        }
        fields[i] = *found;
        if (field->type == LZI_FLOAT && (found->type == LZI_INT || found->type == LZI_UINT)) {
            double number = found->type == LZI_INT ? (double)found->as.integer : (double)found->as.large;
            fields[i] = (lzi_value){.type = LZI_FLOAT, .as.number = number};
        } else if (found->type != field->type && !(field->type == LZI_INT && found->type == LZI_UINT)) {
            return "a message with a field of the wrong type";
        }
    }
    return NULL;
}

const char *lzi_decode_message(lzi_pool *pool, const lzi_message *message, const void *data, size_t nbytes,
                               lzi_value fields[LZI_MAX_FIELDS]) {
    lzi_value value;
    const char *wrong = lzi_decode(pool, data, nbytes, &value);
    return wrong ? wrong : lzi_read_message(message, &value, fields);
}

void lzi_encode_message(lzi_bytes *out, const lzi_message *message, const lzi_value *fields) {
    uint32_t count = 0;
    while (count < LZI_MAX_FIELDS && message->fields[count].name)
        count++;
    lzi_put_map(out, 1 + count);
    lzi_put_text(out, "kind");
    lzi_put_text(out, message->kind);
    for (uint32_t i = 0; i < count; i++) {
        lzi_put_text(out, message->fields[i].name);
        lzi_put_value(out, &fields[i]);
    }
}

lzi_value lzi_int(int64_t integer) {
    return (lzi_value){.type = LZI_INT, .as.integer = integer};
}

lzi_value lzi_text(const char *text) {
    return (lzi_value){.type = LZI_TEXT, .count = (uint32_t)strlen(text), .as.bytes = text};
}

lzi_value lzi_data(const void *data, uint32_t nbytes) {
    return (lzi_value){.type = LZI_BYTES, .count = nbytes, .as.bytes = data};
}

/* --- frames ------------------------------------------------------------------------------------------------------- */

static uint8_t *write_number(uint8_t *at, uint64_t number, unsigned nbytes) {
    for (unsigned i = 0; i < nbytes; i++)
        *at++ = (uint8_t)(number >> 8 * i);
    return at;
}

static uint64_t read_number(const uint8_t *at, unsigned nbytes) {
    uint64_t number = 0;
    while (nbytes--)
        number = number << 8 | at[nbytes];
    return number;
}

void lzi_put_header(lzi_bytes *out, lzi_header header) {
    uint8_t bytes[LZI_HEADER_BYTES], *at = bytes;
    at = write_number(at, header.protocol, 2);
    *at++ = header.kind;
    *at++ = header.flags;
    at = write_number(at, header.route, 4);
    at = write_number(at, header.seq, 8);
    at = write_number(at, header.attempt, 4);
    at = write_number(at, header.aux, 4);
    write_number(at, header.time, 8);
    lzi_put(out, bytes, sizeof bytes);
}

const char *lzi_read_header(const void *frame, size_t nbytes, lzi_header *header) {
    const uint8_t *at = frame;
    if (nbytes < LZI_HEADER_BYTES)
        return "a frame that is shorter than a header";
    *header = (lzi_header){
        .protocol = (uint16_t)read_number(at, 2),
        .kind = at[2],
        .flags = at[3],
        .route = (uint32_t)read_number(at + 4, 4),
        .seq = read_number(at + 8, 8),
        .attempt = (uint32_t)read_number(at + 16, 4),
        .aux = (uint32_t)read_number(at + 20, 4),
        .time = read_number(at + 24, 8),
    };
    return header->protocol == LZI_PROTOCOL ? NULL : "a frame of another protocol";
}

void lzi_put_ref(lzi_bytes *out, lzi_ref ref) {
    uint8_t bytes[LZI_REF_BYTES], *at = bytes;
    at = write_number(at, ref.arena, 4);
    at = write_number(at, ref.flags, 4);
    at = write_number(at, ref.offset, 8);
    write_number(at, ref.nbytes, 8);
    lzi_put(out, bytes, sizeof bytes);
}

bool lzi_read_ref(const void *body, size_t nbytes, size_t index, lzi_ref *ref) {
    if (index >= nbytes / LZI_REF_BYTES)
        return false;
    const uint8_t *at = (const uint8_t *)body + index * LZI_REF_BYTES;
    *ref = (lzi_ref){(uint32_t)read_number(at, 4), (uint32_t)read_number(at + 4, 4), read_number(at + 8, 8),
                     read_number(at + 16, 8)};
    return true;
}
