/* SHA-256 (FIPS 180-4), and HMAC of it (RFC 2104): for the secret of a stack, and digests of inputs. */
#ifndef LZI_SHA256_H
#define LZI_SHA256_H

#include <stddef.h>
#include <stdint.h>

enum { LZI_SHA256_BYTES = 32 };

typedef struct lzi_sha256 {
    uint32_t state[8];
    uint64_t nbytes;
    uint8_t block[64];
} lzi_sha256;

void lzi_sha256_begin(lzi_sha256 *hash);
void lzi_sha256_add(lzi_sha256 *hash, const void *data, size_t nbytes);
void lzi_sha256_end(lzi_sha256 *hash, uint8_t digest[LZI_SHA256_BYTES]);
void lzi_hmac_sha256(const void *key, size_t key_bytes, const void *data, size_t nbytes, uint8_t mac[LZI_SHA256_BYTES]);

#endif
