/* Messages and frames, docs/protocol.md, sections 2 to 5: those that a client sends or gets. */
#ifndef LZI_MESSAGE_H
#define LZI_MESSAGE_H

#include "value.h"

enum {
    LZI_PROTOCOL = 2,
    LZI_HEADER_BYTES = 32,
    LZI_REF_BYTES = 24,
    LZI_DIGEST_BYTES = 16,
    LZI_MAX_FIELDS = 14,
    LZI_MAX_FRAME_BYTES = 1 << 20,
    LZI_MAX_CONTROL_BYTES = 1 << 16,
    LZI_MAX_ROUTE_BYTES = 1 << 16
};
#define LZI_NO_ARENA UINT32_MAX

/* Kinds of frames. */
enum { LZI_ROUTE = 1, LZI_EXECUTE = 2, LZI_REQUEST = 3, LZI_POISONED = 4, LZI_FORGET = 5, LZI_OVERDUE = 7 };
enum { LZI_DECISION = 16, LZI_DONE = 17, LZI_FAILED = 18, LZI_RESPONSE = 19, LZI_LEASE = 20, LZI_RELEASED = 21 };
/* Flags. */
enum { LZI_HAS_DIGEST = 1, LZI_HAS_OUTCOME = 2, LZI_AFTER_LANE = 8, LZI_STILL_LENT = 128 };

typedef struct lzi_field {
    const char *name;
    lzi_type type;
    bool has_default;         /* empty, zero or false ... */
    const char *default_text; /* ... unless this is one */
} lzi_field;

typedef struct lzi_message {
    const char *kind;
    lzi_field fields[LZI_MAX_FIELDS]; /* up to one without a name */
} lzi_message;

extern const lzi_message lzi_hello, lzi_challenge, lzi_proof, lzi_welcome, lzi_redirect, lzi_refused;
extern const lzi_message lzi_add_arena, lzi_arena_added, lzi_retire_arena;
extern const lzi_message lzi_add_lane, lzi_lane_added, lzi_add_counters, lzi_counters_added;
extern const lzi_message lzi_route, lzi_request, lzi_decision, lzi_lease_message, lzi_outcome;

const lzi_message *lzi_message_named(const char *kind);

/* The fields of a message of this kind, in its order. NULL, or what is wrong with the bytes. */
const char *lzi_decode_message(lzi_pool *pool, const lzi_message *message, const void *data, size_t nbytes,
                               lzi_value fields[LZI_MAX_FIELDS]);
/* Also of a value that was decoded already. */
const char *lzi_read_message(const lzi_message *message, const lzi_value *value, lzi_value fields[LZI_MAX_FIELDS]);
void lzi_encode_message(lzi_bytes *out, const lzi_message *message, const lzi_value *fields);

lzi_value lzi_int(int64_t integer);
lzi_value lzi_text(const char *text);
lzi_value lzi_data(const void *data, uint32_t nbytes);

typedef struct lzi_header {
    uint16_t protocol;
    uint8_t kind, flags;
    uint32_t route;
    uint64_t seq;
    uint32_t attempt, aux;
    uint64_t time;
} lzi_header;

typedef struct lzi_ref {
    uint32_t arena, flags;
    uint64_t offset, nbytes;
} lzi_ref;

void lzi_put_header(lzi_bytes *out, lzi_header header);
void lzi_put_ref(lzi_bytes *out, lzi_ref ref);
/* NULL, or what is wrong. */
const char *lzi_read_header(const void *frame, size_t nbytes, lzi_header *header);
bool lzi_read_ref(const void *body, size_t nbytes, size_t index, lzi_ref *ref);

#endif
