#include "sha256.h"

#include <string.h>

static const uint32_t K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static uint32_t turned(uint32_t word, unsigned by) {
    return word >> by | word << (32 - by);
}

static void take_block(uint32_t state[8], const uint8_t *block) {
    uint32_t w[64], s[8];
    for (unsigned i = 0; i < 16; i++)
        w[i] = (uint32_t)block[4 * i] << 24 | (uint32_t)block[4 * i + 1] << 16 | (uint32_t)block[4 * i + 2] << 8 |
               block[4 * i + 3];
    for (unsigned i = 16; i < 64; i++) {
        uint32_t a = w[i - 15], b = w[i - 2];
        w[i] = w[i - 16] + (turned(a, 7) ^ turned(a, 18) ^ a >> 3) + w[i - 7] +
               (turned(b, 17) ^ turned(b, 19) ^ b >> 10);
    }
    memcpy(s, state, sizeof s);
    for (unsigned i = 0; i < 64; i++) {
        uint32_t one = s[7] + (turned(s[4], 6) ^ turned(s[4], 11) ^ turned(s[4], 25)) +
                       ((s[4] & s[5]) ^ (~s[4] & s[6])) + K[i] + w[i];
        uint32_t two = (turned(s[0], 2) ^ turned(s[0], 13) ^ turned(s[0], 22)) +
                       ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
        memmove(s + 1, s, 7 * sizeof *s);
        s[4] += one;
        s[0] = one + two;
    }
    for (unsigned i = 0; i < 8; i++)
        state[i] += s[i];
}

void lzi_sha256_begin(lzi_sha256 *hash) {
    static const uint32_t START[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    memcpy(hash->state, START, sizeof START);
    hash->nbytes = 0;
}

void lzi_sha256_add(lzi_sha256 *hash, const void *data, size_t nbytes) {
    const uint8_t *at = data;
    while (nbytes) {
        size_t used = hash->nbytes % 64, step = 64 - used < nbytes ? 64 - used : nbytes;
        memcpy(hash->block + used, at, step);
        hash->nbytes += step;
        at += step;
        nbytes -= step;
        if (used + step == 64)
            take_block(hash->state, hash->block);
    }
}

void lzi_sha256_end(lzi_sha256 *hash, uint8_t digest[LZI_SHA256_BYTES]) {
    uint64_t bits = 8 * hash->nbytes;
    uint8_t tail[72] = {0x80};
    size_t padding = (size_t)((119 - hash->nbytes % 64) % 64) + 1;
    for (unsigned i = 0; i < 8; i++)
        tail[padding + i] = (uint8_t)(bits >> 8 * (7 - i));
    lzi_sha256_add(hash, tail, padding + 8);
    for (unsigned i = 0; i < LZI_SHA256_BYTES; i++)
        digest[i] = (uint8_t)(hash->state[i / 4] >> 8 * (3 - i % 4));
}

void lzi_hmac_sha256(const void *key, size_t key_bytes, const void *data, size_t nbytes,
                     uint8_t mac[LZI_SHA256_BYTES]) {
    uint8_t block[64] = {0}, pad[64];
    lzi_sha256 hash;
    if (key_bytes > sizeof block) {
        lzi_sha256_begin(&hash);
        lzi_sha256_add(&hash, key, key_bytes);
        lzi_sha256_end(&hash, block);
    } else {
        memcpy(block, key, key_bytes);
    }
    for (unsigned outer = 0; outer < 2; outer++) {
        for (unsigned i = 0; i < sizeof pad; i++)
            pad[i] = block[i] ^ (outer ? 0x5c : 0x36);
        lzi_sha256_begin(&hash);
        lzi_sha256_add(&hash, pad, sizeof pad);
        lzi_sha256_add(&hash, outer ? mac : data, outer ? LZI_SHA256_BYTES : nbytes);
        lzi_sha256_end(&hash, mac);
    }
}
