/* Tensors of a call, as they were given and checked. */
#ifndef LZI_TENSORS_H
#define LZI_TENSORS_H

#include "client.h"

enum { LZI_MAX_TENSORS = 64 };

typedef struct lzi_tensor {
    lz_dtype dtype; /* LZ_NO_TENSOR: left out */
    uint32_t ndim;
    int64_t shape[LZ_MAX_DIMENSIONS], strides[LZ_MAX_DIMENSIONS];
    char *data;
    uint64_t nbytes; /* of its reference */
    lzi_block *block;
    lzi_ref ref;
} lzi_tensor;

/* That there may be so many. */
lz_code lzi_check_count(size_t count, const lz_tensor *given, const char *what, lz_error *error);
/* Check `count` tensors of the caller's, LZI_MAX_TENSORS at most. `what`: "input" or "output". */
lz_code lzi_read_tensors(const lz_tensor *given, size_t count, const char *what, lzi_tensor *tensors,
                         lz_error *error);
bool lzi_is_row_major(const lzi_tensor *tensor);
uint64_t lzi_dense_bytes(const lzi_tensor *tensor);
/* Its elements in row-major order, in pieces. */
void lzi_each_piece(const lzi_tensor *tensor, void (*take)(void *with, const void *data, size_t nbytes), void *with);
/* Those elements, one after the other. */
void lzi_copy_dense(const lzi_tensor *tensor, void *to);
/* A tensor of what the wire has of one: dtype, shape and strides, in the pool; and the bytes that it spans. */
bool lzi_tensor_of(lzi_pool *pool, const lzi_value spec[3], lz_tensor *to, uint64_t *nbytes);
void lzi_put_spec(lzi_bytes *out, const lzi_tensor *tensor);

#endif
