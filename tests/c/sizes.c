/* The sizes of the header's structs, for bindings that are written by hand. */
#include "layerzero.h"

#include <stdio.h>

int main(void) {
    printf("%zu %zu %zu %zu %zu %zu %zu %zu %zu %zu %zu %zu %zu %zu %zu", sizeof(lz_error), sizeof(lz_connect_options), sizeof(lz_tensor),
           sizeof(lz_attr), sizeof(lz_call_spec), sizeof(lz_reason), sizeof(lz_candidate), sizeof(lz_attempt),
           sizeof(lz_report), sizeof(lz_bundle_tensor), sizeof(lz_bundle_environment), sizeof(lz_bundle_info),
           sizeof(lz_bundle_options), sizeof(lz_bundle_run_spec), sizeof(lz_bundle_report));
    return 0;
}
