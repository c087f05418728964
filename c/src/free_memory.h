/* What this process can still get of the machine's memory. */
#ifndef LZI_FREE_MEMORY_H
#define LZI_FREE_MEMORY_H

#include "../layerzero.h"

/* May so much shared memory be reserved, and a margin stay free? It has no limit of its own: who reserves more than
 * there is wakes the kernel's OOM killer, which ends any process it likes. LZ_NO_MEMORY, LZ_CONFIG. */
lz_code lzi_check_free(uint64_t nbytes, lz_error *error);

#endif
