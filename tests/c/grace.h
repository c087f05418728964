/* In link.c of the tests' library: for how long a broker that was asked for a sign of life may be silent. */
#include <stdlib.h>

static inline double grace_s(void) {
    const char *text = getenv("LZ_TEST_GRACE_S");
    return text ? atof(text) : 120.0; /* on a busy machine, too */
}
#define LZI_GRACE_S grace_s()
