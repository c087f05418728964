#include "value.h"

#include <stdlib.h>
#include <string.h>

enum { CHUNK_BYTES = 4096 };

struct lzi_chunk {
    lzi_chunk *next;
    size_t used, room;
    max_align_t memory[];
};

void *lzi_take(lzi_pool *pool, size_t nbytes) {
    if (nbytes > SIZE_MAX / 2)
        return NULL;
    nbytes = (nbytes + 15) & ~(size_t)15;
    lzi_chunk *chunk = pool->chunks;
    if (!chunk || chunk->room - chunk->used < nbytes) {
        size_t room = nbytes > CHUNK_BYTES ? nbytes : CHUNK_BYTES;
        chunk = calloc(1, sizeof *chunk + room);
        if (!chunk)
            return NULL;
        chunk->room = room;
        chunk->next = pool->chunks;
        pool->chunks = chunk;
    }
    void *taken = (char *)chunk->memory + chunk->used;
    chunk->used += nbytes;
    return taken;
}

void lzi_pool_free(lzi_pool *pool) {
    while (pool->chunks) {
        lzi_chunk *next = pool->chunks->next;
        free(pool->chunks);
        pool->chunks = next;
    }
}

bool lzi_is_utf8(const void *data, size_t nbytes) {
    const uint8_t *at = data, *end = at + nbytes;
    while (at < end) {
        uint8_t first = *at++;
        if (first < 0x80)
            continue;
        unsigned more = first >= 0xF0 ? 3 : first >= 0xE0 ? 2 : 1;
        if (first < 0xC2 || first > 0xF4 || (size_t)(end - at) < more)
            return false;
        /* Overlong forms, surrogates, and what is beyond Unicode show in the second byte. */
        uint8_t least = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
        uint8_t greatest = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
        if (*at < least || *at > greatest)
            return false;
        for (at++; --more; at++)
            if ((*at & 0xC0) != 0x80)
                return false;
    }
    return true;
}

/* --- decoding ----------------------------------------------------------------------------------------------------- */

typedef struct reader {
    const uint8_t *at, *end;
    lzi_pool *pool;
    size_t items,
        most_items; /* each takes a byte at least, so that no claim takes more memory than its bytes justify */
} reader;

static const char *const CUT = "the bytes end within a value";
static const char *const NO_ROOM = "there is no memory for it";

static bool number_of(reader *from, unsigned nbytes, uint64_t *number) {
    if ((size_t)(from->end - from->at) < nbytes)
        return false;
    *number = 0;
    while (nbytes--)
        *number = *number << 8 | *from->at++;
    return true;
}

static const char *take_bytes(reader *from, lzi_value *value, lzi_type type, uint64_t count) {
    if (count > (uint64_t)(from->end - from->at))
        return CUT;
    if (type == LZI_TEXT && !lzi_is_utf8(from->at, (size_t)count))
        return "a text that is not UTF-8";
    char *bytes = lzi_take(from->pool, (size_t)count + 1);
    if (!bytes)
        return NO_ROOM;
    memcpy(bytes, from->at, (size_t)count);
    from->at += count;
    *value = (lzi_value){.type = type, .count = (uint32_t)count, .as.bytes = bytes};
    return NULL;
}

static const char *take(reader *from, lzi_value *value, unsigned depth);

static const char *take_items(reader *from, lzi_value *value, lzi_type type, uint64_t count, unsigned depth) {
    uint64_t items = type == LZI_MAP ? 2 * count : count;
    if (items > from->most_items - from->items)
        return CUT;
    if (items && depth >= LZI_MAX_DEPTH)
        return "it is nested too deep";
    from->items += items;
    *value = (lzi_value){.type = type, .count = (uint32_t)count};
    if (!items)
        return NULL;
    value->as.items = lzi_take(from->pool, (size_t)items * sizeof *value->as.items);
    if (!value->as.items)
        return NO_ROOM;
    for (uint64_t i = 0; i < items; i++) {
        const char *wrong = take(from, &value->as.items[i], depth + 1);
        if (wrong)
            return wrong;
        if (type == LZI_MAP && i % 2 == 0 && value->as.items[i].type != LZI_TEXT)
            return "a map has a key that is not text";
    }
    return NULL;
}

static lzi_value integer_of(int64_t integer) {
    return (lzi_value){.type = LZI_INT, .as.integer = integer};
}

static const char *take_number(reader *from, uint8_t first, lzi_value *value) {
    uint64_t bits;
    unsigned nbytes = first == 0xCA ? 4 : first == 0xCB ? 8 : 1u << (first & 3);
    if (!number_of(from, nbytes, &bits))
        return CUT;
    if (first == 0xCA) {
        float single;
        uint32_t half = (uint32_t)bits;
        memcpy(&single, &half, sizeof single);
        *value = (lzi_value){.type = LZI_FLOAT, .as.number = single};
    } else if (first == 0xCB) {
        *value = (lzi_value){.type = LZI_FLOAT};
        memcpy(&value->as.number, &bits, sizeof bits);
    } else if (first >= 0xD0) { /* signed: extend it */
        unsigned shift = 64 - 8 * nbytes;
        uint64_t sign = UINT64_C(1) << 63;
        uint64_t shifted = bits << shift;
        *value = integer_of(shifted & sign ? -(int64_t)((~shifted >> shift) & (sign - 1)) - 1 : (int64_t)bits);
    } else if (bits > INT64_MAX) {
        *value = (lzi_value){.type = LZI_UINT, .as.large = bits};
    } else {
        *value = integer_of((int64_t)bits);
    }
    return NULL;
}

static const char *take(reader *from, lzi_value *value, unsigned depth) {
    if (from->at == from->end)
        return CUT;
    uint8_t first = *from->at++;
    uint64_t count;
    if (first < 0x80 || first >= 0xE0) {
        *value = integer_of(first < 0x80 ? first : first - 256);
        return NULL;
    }
    if (first < 0x90)
        return take_items(from, value, LZI_MAP, first & 15, depth);
    if (first < 0xA0)
        return take_items(from, value, LZI_LIST, first & 15, depth);
    if (first < 0xC0)
        return take_bytes(from, value, LZI_TEXT, first & 31);
    switch (first) {
    case 0xC0:
        *value = (lzi_value){.type = LZI_NIL};
        return NULL;
    case 0xC2:
    case 0xC3:
        *value = (lzi_value){.type = LZI_BOOL, .as.is_true = first == 0xC3};
        return NULL;
    case 0xC4:
    case 0xC5:
    case 0xC6:
        return number_of(from, 1u << (first - 0xC4), &count) ? take_bytes(from, value, LZI_BYTES, count) : CUT;
    case 0xD9:
    case 0xDA:
    case 0xDB:
        return number_of(from, 1u << (first - 0xD9), &count) ? take_bytes(from, value, LZI_TEXT, count) : CUT;
    case 0xDC:
    case 0xDD:
        return number_of(from, 2u << (first - 0xDC), &count) ? take_items(from, value, LZI_LIST, count, depth) : CUT;
    case 0xDE:
    case 0xDF:
        return number_of(from, 2u << (first - 0xDE), &count) ? take_items(from, value, LZI_MAP, count, depth) : CUT;
    default:
        if (first >= 0xCA && first <= 0xD3)
            return take_number(from, first, value);
        return "a value of an extended type";
    }
}

const char *lzi_decode(lzi_pool *pool, const void *data, size_t nbytes, lzi_value *value) {
    reader from = {data, (const uint8_t *)data + nbytes, pool, 0, nbytes};
    if (!nbytes)
        return CUT;
    const char *wrong = take(&from, value, 1);
    if (!wrong && from.at != from.end)
        return "there are bytes behind it";
    return wrong;
}

bool lzi_is_text(const lzi_value *value, const char *text) {
    size_t nbytes = strlen(text);
    return value && value->type == LZI_TEXT && value->count == nbytes && !memcmp(value->as.bytes, text, nbytes);
}

const lzi_value *lzi_get(const lzi_value *map, const char *key) {
    if (!map || map->type != LZI_MAP)
        return NULL;
    for (uint32_t i = map->count; i-- > 0;)
        if (lzi_is_text(&map->as.items[2 * i], key))
            return &map->as.items[2 * i + 1];
    return NULL;
}

const char *lzi_get_text(const lzi_value *map, const char *key) {
    const lzi_value *found = lzi_get(map, key);
    return found && found->type == LZI_TEXT ? found->as.bytes : "";
}

int64_t lzi_get_int(const lzi_value *map, const char *key, int64_t otherwise) {
    const lzi_value *found = lzi_get(map, key);
    return found && found->type == LZI_INT ? found->as.integer : otherwise;
}

bool lzi_get_number(const lzi_value *map, const char *key, double *number) {
    const lzi_value *found = lzi_get(map, key);
    if (!found || (found->type != LZI_FLOAT && found->type != LZI_INT))
        return false;
    *number = found->type == LZI_FLOAT ? found->as.number : (double)found->as.integer;
    return true;
}

/* --- encoding ----------------------------------------------------------------------------------------------------- */

void lzi_put(lzi_bytes *out, const void *data, size_t nbytes) {
    if (out->have_failed || !nbytes)
        return;
    if (out->room - out->nbytes < nbytes) {
        size_t room = 2 * (out->nbytes + nbytes) + 64;
        uint8_t *grown = realloc(out->data, room);
        if (!grown) {
            out->have_failed = true;
            return;
        }
        out->data = grown;
        out->room = room;
    }
    memcpy(out->data + out->nbytes, data, nbytes);
    out->nbytes += nbytes;
}

static void put_head(lzi_bytes *out, uint8_t first, uint64_t number, unsigned nbytes) {
    uint8_t head[9] = {first};
    for (unsigned i = 0; i < nbytes; i++)
        head[1 + i] = (uint8_t)(number >> 8 * (nbytes - 1 - i));
    lzi_put(out, head, 1 + nbytes);
}

/* The shortest form: `small` and those after it, for counts of 1, 2 and 4 bytes. */
static void put_count(lzi_bytes *out, uint8_t fixed, uint32_t most, uint8_t small, bool has_byte, uint32_t count) {
    if (count < most)
        put_head(out, (uint8_t)(fixed | count), 0, 0);
    else if (has_byte && count < 0x100)
        put_head(out, small, count, 1);
    else if (count < 0x10000)
        put_head(out, (uint8_t)(small + has_byte), count, 2);
    else
        put_head(out, (uint8_t)(small + has_byte + 1), count, 4);
}

void lzi_put_map(lzi_bytes *out, uint32_t pairs) {
    put_count(out, 0x80, 16, 0xDE, false, pairs);
}

void lzi_put_list(lzi_bytes *out, uint32_t items) {
    put_count(out, 0x90, 16, 0xDC, false, items);
}

static void put_text(lzi_bytes *out, const char *text, size_t nbytes) {
    put_count(out, 0xA0, 32, 0xD9, true, (uint32_t)nbytes);
    lzi_put(out, text, nbytes);
}

void lzi_put_text(lzi_bytes *out, const char *text) {
    put_text(out, text, strlen(text));
}

static void put_unsigned(lzi_bytes *out, uint64_t number) {
    if (number < 0x80)
        put_head(out, (uint8_t)number, 0, 0);
    else if (number < 0x100)
        put_head(out, 0xCC, number, 1);
    else if (number < 0x10000)
        put_head(out, 0xCD, number, 2);
    else if (number <= UINT32_MAX)
        put_head(out, 0xCE, number, 4);
    else
        put_head(out, 0xCF, number, 8);
}

void lzi_put_int(lzi_bytes *out, int64_t integer) {
    uint64_t bits = (uint64_t)integer;
    if (integer >= 0)
        put_unsigned(out, bits);
    else if (integer >= -32)
        put_head(out, (uint8_t)bits, 0, 0);
    else if (integer >= INT8_MIN)
        put_head(out, 0xD0, bits, 1);
    else if (integer >= INT16_MIN)
        put_head(out, 0xD1, bits, 2);
    else if (integer >= INT32_MIN)
        put_head(out, 0xD2, bits, 4);
    else
        put_head(out, 0xD3, bits, 8);
}

void lzi_put_float(lzi_bytes *out, double number) {
    uint64_t bits;
    memcpy(&bits, &number, sizeof bits);
    put_head(out, 0xCB, bits, 8);
}

void lzi_put_bool(lzi_bytes *out, bool is_true) {
    put_head(out, is_true ? 0xC3 : 0xC2, 0, 0);
}

void lzi_put_nil(lzi_bytes *out) {
    put_head(out, 0xC0, 0, 0);
}

void lzi_put_value(lzi_bytes *out, const lzi_value *value) {
    switch (value->type) {
    case LZI_NIL:
        lzi_put_nil(out);
        break;
    case LZI_BOOL:
        lzi_put_bool(out, value->as.is_true);
        break;
    case LZI_INT:
        lzi_put_int(out, value->as.integer);
        break;
    case LZI_UINT:
        put_unsigned(out, value->as.large);
        break;
    case LZI_FLOAT:
        lzi_put_float(out, value->as.number);
        break;
    case LZI_TEXT:
        put_text(out, value->as.bytes, value->count);
        break;
    case LZI_BYTES:
        put_count(out, 0, 0, 0xC4, true, value->count);
        lzi_put(out, value->as.bytes, value->count);
        break;
    case LZI_LIST:
        lzi_put_list(out, value->count);
        for (uint32_t i = 0; i < value->count; i++)
            lzi_put_value(out, &value->as.items[i]);
        break;
    case LZI_MAP:
        lzi_put_map(out, value->count);
        for (uint32_t i = 0; i < 2 * value->count; i++)
            lzi_put_value(out, &value->as.items[i]);
        break;
    }
}

void lzi_bytes_free(lzi_bytes *bytes) {
    free(bytes->data);
    *bytes = (lzi_bytes){0};
}
