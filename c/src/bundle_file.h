/* The file of a bundle, docs/bundles.md: read and checked whole. */
#ifndef LZI_BUNDLE_FILE_H
#define LZI_BUNDLE_FILE_H

#include "tensors.h"

typedef enum lzi_home_kind { LZI_HOME_INPUT, LZI_HOME_OUTPUT, LZI_HOME_SLOT, LZI_HOME_CONSTANT } lzi_home_kind;

/* Memory: the caller's input or output number `place`, or bytes from `place` on of all slots or constants. */
typedef struct lzi_home {
    lzi_home_kind kind;
    uint64_t place, nbytes;
} lzi_home;

typedef struct lzi_place {
    uint32_t home;
    uint64_t offset, nbytes; /* of its first byte in the home, and to the end of its last */
    lz_tensor tensor;        /* without its data */
} lzi_place;

typedef struct lzi_step {
    const char *op, *backend, *kernel, *where;
    bool is_pinned;                    /* the function named the backend */
    uint32_t input_count, output_count;
    const lzi_place **inputs, **outputs; /* NULL: an input that is left out */
    const lz_attr *attrs;
    uint32_t attr_count;
} lzi_step;

typedef struct lzi_bundle_file {
    lzi_pool pool; /* of all that follows */
    lz_bundle_info info;
    const lzi_home *homes;
    const lzi_place **inputs, **outputs;
    const lzi_step *steps;
    uint64_t constants_at; /* in the file */
    uint8_t constants_sha256[32];
} lzi_bundle_file;

/* Open and read it, all but its constants; `fd` is the caller's to close, -1 where there is none. */
lz_code lzi_bundle_read(const char *path, int *fd, lzi_bundle_file *file, lz_error *error);
/* Read the constants to `to`, which has room for them, and compare them. */
lz_code lzi_bundle_constants(const char *path, int fd, const lzi_bundle_file *file, void *to, lz_error *error);

#endif
