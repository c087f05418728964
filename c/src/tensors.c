#include "tensors.h"

#include <string.h>

static const uint64_t MOST = (uint64_t)1 << 46;

static const struct {
    const char *name;
    uint8_t nbytes;
} DTYPES[] = {
    {"", 0},        {"bool", 1},    {"uint8", 1},         {"int8", 1},        {"uint16", 2},           {"int16", 2},
    {"uint32", 4},  {"int32", 4},   {"uint64", 8},        {"int64", 8},       {"float16", 2},          {"bfloat16", 2},
    {"float32", 4}, {"float64", 8}, {"float8_e4m3fn", 1}, {"float8_e5m2", 1}, {"float4_e2m1fn_x2", 1},
};
enum { DTYPE_COUNT = sizeof DTYPES / sizeof *DTYPES };

static bool is_empty(const lzi_tensor *tensor) {
    for (uint32_t i = 0; i < tensor->ndim; i++)
        if (!tensor->shape[i])
            return true;
    return false;
}

/* From the first element to the end of the last; false where that is too much. */
static bool span_of(const lzi_tensor *tensor, uint64_t *nbytes) {
    uint64_t last = 0, step, itemsize = DTYPES[tensor->dtype].nbytes;
    *nbytes = 0;
    if (is_empty(tensor))
        return true;
    for (uint32_t i = 0; i < tensor->ndim; i++) {
        if (__builtin_mul_overflow((uint64_t)tensor->shape[i] - 1, (uint64_t)tensor->strides[i], &step) || step > MOST)
            return false;
        last += step;
    }
    *nbytes = (last + 1) * itemsize;
    return *nbytes <= MOST;
}

static lz_code read_tensor(const lz_tensor *given, const char *what, size_t index, lzi_tensor *to, lz_error *error) {
    memset(to, 0, sizeof *to);
    if (given->dtype < 0 || given->dtype >= DTYPE_COUNT)
        return lzi_fail(error, LZ_INVALID_ARGUMENT, "Give %s %zu a dtype of lz_dtype; it has %d", what, index,
                        given->dtype);
    to->dtype = (lz_dtype)given->dtype;
    if (to->dtype == LZ_NO_TENSOR)
        return LZ_OK;
    if (given->ndim > LZ_MAX_DIMENSIONS || (given->ndim && !given->shape))
        return lzi_fail(error, LZ_INVALID_ARGUMENT, "Give %s %zu at most %d dimensions, and a shape; it has %u", what,
                        index, LZ_MAX_DIMENSIONS, given->ndim);
    to->ndim = given->ndim;
    to->data = given->data;
    uint64_t dense = 1;
    for (uint32_t i = given->ndim; i-- > 0;) {
        int64_t extent = given->shape[i], stride = given->strides ? given->strides[i] : (int64_t)dense;
        if (extent < 0 || (uint64_t)extent > MOST || stride < 0 || (uint64_t)stride > MOST)
            return lzi_fail(error, LZ_INVALID_ARGUMENT,
                            "Give %s %zu extents and strides of 0 to 2^46; dimension %u has "
                            "extent %lld and stride %lld",
                            what, index, i, (long long)extent, (long long)stride);
        to->shape[i] = extent;
        to->strides[i] = stride;
        if (__builtin_mul_overflow(dense, (uint64_t)(extent ? extent : 1), &dense) || dense > MOST)
            dense = MOST + 1; /* too much, unless it has no elements or strides of its own */
    }
    uint64_t span;
    if (!span_of(to, &span))
        return lzi_fail(error, LZ_INVALID_ARGUMENT, "Make %s %zu smaller: a tensor spans at most 2^46 bytes", what,
                        index);
    if (given->nbytes && given->nbytes < span)
        return lzi_fail(error, LZ_INVALID_ARGUMENT, "Give %s %zu room for its elements: nbytes is %zu, needed: %llu",
                        what, index, given->nbytes, (unsigned long long)span);
    to->nbytes = given->nbytes ? given->nbytes : span;
    return LZ_OK;
}

lz_code lzi_check_count(size_t count, const lz_tensor *given, const char *what, lz_error *error) {
    if (count > LZI_MAX_TENSORS || (count && !given))
        return lzi_fail(error, LZ_INVALID_ARGUMENT, "Give a call at most %d %ss, as an array; it has %zu",
                        LZI_MAX_TENSORS, what, count);
    return LZ_OK;
}

lz_code lzi_read_tensors(const lz_tensor *given, size_t count, const char *what, lzi_tensor *tensors, lz_error *error) {
    lz_code wrong = lzi_check_count(count, given, what, error);
    if (wrong)
        return wrong;
    size_t size = count ? given->struct_size : 0;
    for (size_t i = 0; i < count; i++) {
        lz_tensor one = {0};
        const char *at = (const char *)given + i * size;
        memcpy(&one.struct_size, at, sizeof one.struct_size);
        if (one.struct_size != size || size < offsetof(lz_tensor, nbytes))
            return lzi_fail(error, LZ_INVALID_ARGUMENT,
                            "Set struct_size of every lz_tensor to its sizeof; of %s %zu it is "
                            "%zu",
                            what, i, one.struct_size);
        memcpy(&one, at, size < sizeof one ? size : sizeof one);
        lz_code code = read_tensor(&one, what, i, &tensors[i], error);
        if (code)
            return code;
    }
    return LZ_OK;
}

bool lzi_is_row_major(const lzi_tensor *tensor) {
    int64_t dense = 1;
    for (uint32_t i = tensor->ndim; i-- > 0;) {
        if (tensor->shape[i] != 1 && tensor->strides[i] != dense)
            return is_empty(tensor);
        dense *= tensor->shape[i];
    }
    return true;
}

/* At most 2^60: a dimension that is broadcast takes no memory, and its copy does. */
uint64_t lzi_dense_bytes(const lzi_tensor *tensor) {
    uint64_t nbytes = DTYPES[tensor->dtype].nbytes;
    for (uint32_t i = 0; i < tensor->ndim; i++)
        if (__builtin_mul_overflow(nbytes, (uint64_t)tensor->shape[i], &nbytes))
            return UINT64_MAX;
    return nbytes;
}

void lzi_each_piece(const lzi_tensor *tensor, void (*take)(void *with, const void *data, size_t nbytes), void *with) {
    size_t itemsize = DTYPES[tensor->dtype].nbytes;
    int64_t index[LZ_MAX_DIMENSIONS] = {0};
    const char *at = tensor->data;
    if (tensor->dtype == LZ_NO_TENSOR || is_empty(tensor))
        return;
    if (lzi_is_row_major(tensor)) {
        take(with, at, (size_t)lzi_dense_bytes(tensor));
        return;
    }
    for (uint32_t i = tensor->ndim; i;) {
        take(with, at, itemsize);
        for (i = tensor->ndim; i; i--) { /* on to the next element; i is 0 behind the last one */
            size_t step = (size_t)tensor->strides[i - 1] * itemsize;
            at += step;
            if (++index[i - 1] < tensor->shape[i - 1])
                break;
            at -= step * (size_t)tensor->shape[i - 1];
            index[i - 1] = 0;
        }
    }
}

static void append(void *with, const void *data, size_t nbytes) {
    char **to = with;
    memcpy(*to, data, nbytes);
    *to += nbytes;
}

void lzi_copy_dense(const lzi_tensor *tensor, void *to) {
    char *at = to;
    lzi_each_piece(tensor, append, &at);
}

static bool read_extents(lzi_pool *pool, const lzi_value *list, const int64_t **to, uint32_t *count) {
    if (list->type != LZI_LIST || list->count > LZ_MAX_DIMENSIONS)
        return false;
    int64_t *extents = lzi_take(pool, (list->count + 1) * sizeof *extents);
    if (!extents)
        return false;
    for (uint32_t i = 0; i < list->count; i++) {
        if (list->as.items[i].type != LZI_INT)
            return false;
        extents[i] = list->as.items[i].as.integer;
    }
    *to = extents;
    *count = list->count;
    return true;
}

bool lzi_tensor_of(lzi_pool *pool, const lzi_value spec[3], lz_tensor *to, uint64_t *nbytes) {
    lzi_tensor checked;
    uint32_t strides = 0;
    *to = (lz_tensor){.struct_size = sizeof *to};
    for (int i = 1; i < DTYPE_COUNT; i++)
        if (lzi_is_text(&spec[0], DTYPES[i].name))
            to->dtype = i;
    if (!to->dtype || !read_extents(pool, &spec[1], &to->shape, &to->ndim) ||
        !read_extents(pool, &spec[2], &to->strides, &strides) || strides != to->ndim ||
        lzi_read_tensors(to, 1, "tensor", &checked, NULL))
        return false;
    *nbytes = checked.nbytes;
    return true;
}

void lzi_put_spec(lzi_bytes *out, const lzi_tensor *tensor) {
    if (tensor->dtype == LZ_NO_TENSOR) {
        lzi_put_nil(out);
        return;
    }
    lzi_put_list(out, 3);
    lzi_put_text(out, DTYPES[tensor->dtype].name);
    lzi_put_list(out, tensor->ndim);
    for (uint32_t i = 0; i < tensor->ndim; i++)
        lzi_put_int(out, tensor->shape[i]);
    lzi_put_list(out, tensor->ndim);
    for (uint32_t i = 0; i < tensor->ndim; i++)
        lzi_put_int(out, tensor->strides[i]);
}
