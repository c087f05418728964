/* msgpack: the plain values that bodies of messages are made of, as docs/protocol.md, section 2, allows them. */
#ifndef LZI_VALUE_H
#define LZI_VALUE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { LZI_MAX_DEPTH = 32 };

/* Memory that goes all at once. */
typedef struct lzi_chunk lzi_chunk;
typedef struct lzi_pool {
    lzi_chunk *chunks;
} lzi_pool;

void *lzi_take(lzi_pool *pool, size_t nbytes); /* zeroed; NULL when there is none */
void lzi_pool_free(lzi_pool *pool);

typedef enum lzi_type {
    LZI_NIL,
    LZI_BOOL,
    LZI_INT,
    LZI_UINT, /* above INT64_MAX alone */
    LZI_FLOAT,
    LZI_TEXT,
    LZI_BYTES,
    LZI_LIST,
    LZI_MAP
} lzi_type;

typedef struct lzi_value lzi_value;
struct lzi_value {
    lzi_type type;
    uint32_t count; /* bytes of text and bytes, items of a list, pairs of a map */
    union {
        bool is_true;
        int64_t integer;
        uint64_t large;
        double number;
        const char *bytes; /* with a zero byte behind them */
        lzi_value *items;  /* of a map: key, value, key, value, ... */
    } as;
};

/* The one value that these bytes are. NULL, or what is wrong with them; the value lies in the pool. */
const char *lzi_decode(lzi_pool *pool, const void *data, size_t nbytes, lzi_value *value);

/* The last value with this key, as every reader takes it; NULL: there is none, or this is no map. */
const lzi_value *lzi_get(const lzi_value *map, const char *key);
const char *lzi_get_text(const lzi_value *map, const char *key); /* "" where there is no text */
int64_t lzi_get_int(const lzi_value *map, const char *key, int64_t otherwise);
bool lzi_get_number(const lzi_value *map, const char *key, double *number);
bool lzi_is_text(const lzi_value *value, const char *text);
bool lzi_is_utf8(const void *data, size_t nbytes);

/* Bytes that grow. Once there is no memory for them they stay as they are, and have_failed. */
typedef struct lzi_bytes {
    uint8_t *data;
    size_t nbytes, room;
    bool have_failed;
} lzi_bytes;

void lzi_put(lzi_bytes *out, const void *data, size_t nbytes);
void lzi_put_map(lzi_bytes *out, uint32_t pairs);
void lzi_put_list(lzi_bytes *out, uint32_t items);
void lzi_put_text(lzi_bytes *out, const char *text);
void lzi_put_int(lzi_bytes *out, int64_t integer);
void lzi_put_float(lzi_bytes *out, double number);
void lzi_put_bool(lzi_bytes *out, bool is_true);
void lzi_put_nil(lzi_bytes *out);
void lzi_put_value(lzi_bytes *out, const lzi_value *value);
void lzi_bytes_free(lzi_bytes *bytes);

#endif
