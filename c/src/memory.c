#include "client.h"
#include "free_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define ALIGNMENT 64u
#define FIRST_ARENA_BYTES ((uint64_t)4 << 20)
#define MAX_SHARED_ARENA_BYTES ((uint64_t)64 << 20)
#define OWN_ARENA_BYTES ((uint64_t)8 << 20) /* blocks from this size on have an arena of their own */
#define MAX_ARENA_BYTES ((uint64_t)1 << 46)
#define STEP_BYTES ((uint64_t)1 << 30) /* reserved between two looks at what is free: others take memory meanwhile */

/* A part of an arena. Its neighbours in memory are those in the list; two free ones are never neighbours. */
struct lzi_block {
    lzi_arena *arena;
    lzi_block *before, *after;
    uint64_t offset, nbytes, wanted;
    uint32_t pins;          /* calls that use it */
    bool is_free, is_given; /* given: it is free when the last pin goes */
};

struct lzi_arena {
    uint32_t number;
    bool is_shared;
    int fd;
    uint64_t nbytes;
    char *mapped;
    lzi_block *first;
};

static bool is_empty(const lzi_arena *arena) {
    return arena->first->is_free && !arena->first->after;
}

static void unmap(lzi_arena *arena) {
    for (lzi_block *block = arena->first; block;) {
        lzi_block *after = block->after;
        free(block);
        block = after;
    }
    if (arena->mapped)
        munmap(arena->mapped, arena->nbytes);
    if (arena->fd >= 0)
        close(arena->fd);
    free(arena);
}

/* Show the broker an arena; returns when it knows it. */
static lz_code show(lzi_memory *memory, lzi_arena *arena, lz_error *error) {
    lzi_value fields[] = {lzi_int(arena->number), lzi_int((int64_t)arena->nbytes)}, answer[LZI_MAX_FIELDS];
    lzi_shown shown = {&lzi_add_arena, fields, arena->fd, &lzi_arena_added, true};
    return lzi_show(memory, &shown, answer, NULL, error);
}

/* An arena of which the broker has not heard is nothing to it. */
static void retire(lzi_memory *memory, const lzi_arena *arena) {
    lzi_value number = lzi_int(arena->number);
    lzi_bytes message = {0};
    lzi_encode_message(&message, &lzi_retire_arena, &number);
    lzi_control_send(memory->control, &message, -1, NULL); /* a broker that is gone has no arena any more */
    lzi_bytes_free(&message);
}

/* Give a file all its pages. */
static lz_code reserve(int fd, uint64_t nbytes, int *reason, lz_error *error) {
    for (uint64_t at = 0; at < nbytes && !*reason;) {
        uint64_t rest = nbytes - at, step = rest < STEP_BYTES ? rest : STEP_BYTES;
        lz_code code = lzi_check_free(rest, error);
        if (code)
            return code;
        while ((*reason = posix_fallocate(fd, (off_t)at, (off_t)step)) == EINTR)
            ;
        at += step;
    }
    return LZ_OK;
}

lz_code lzi_share(const char *name, uint64_t nbytes, int *fd, char **mapped, lz_error *error) {
    int reason = 0;
    lz_code code = LZ_OK;
    *mapped = NULL;
    *fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (*fd < 0)
        reason = errno;
    if (!reason)
        code = reserve(*fd, nbytes, &reason, error);
    if (!code && !reason && fcntl(*fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL))
        reason = errno;
    if (!code && !reason) {
        void *found = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
        reason = found == MAP_FAILED ? errno : 0;
        *mapped = reason ? NULL : found;
    }
    if (reason)
        code = lzi_fail(error, LZ_NO_MEMORY,
                        "Free shared memory, or allow more of it (/dev/shm, memory of the container), "
                        "then try again.\n%llu bytes could not be reserved: %s",
                        (unsigned long long)nbytes, strerror(reason));
    if (code && *fd >= 0) {
        close(*fd);
        *fd = -1;
    }
    return code;
}

static lz_code open_arena(lzi_memory *memory, uint64_t nbytes, bool is_shared, lzi_arena **opened, lz_error *error) {
    lzi_arena *arena = calloc(1, sizeof *arena);
    lzi_block *first = calloc(1, sizeof *first);
    if (memory->count == memory->room) {
        size_t room = 2 * memory->room + 8;
        lzi_arena **grown = realloc(memory->arenas, room * sizeof *grown);
        if (grown) {
            memory->arenas = grown;
            memory->room = room;
        }
    }
    if (!arena || !first || memory->count == memory->room) {
        free(arena);
        free(first);
        return lzi_fail(error, LZ_NO_MEMORY, "Free memory, then try again.\nThere is none for an arena's record");
    }
    *first = (lzi_block){.arena = arena, .nbytes = nbytes, .is_free = true};
    *arena = (lzi_arena){.nbytes = nbytes, .is_shared = is_shared, .first = first};
    lz_code code = lzi_share("layerzero", nbytes, &arena->fd, &arena->mapped, error);
    if (!code) {
        arena->number = ++memory->last_number; /* a number that was refused is spent as well */
        code = show(memory, arena, error);
    }
    if (code) {
        if (arena->number)
            retire(memory, arena); /* a broker that is slow may have it yet */
        unmap(arena);
        return code;
    }
    memory->arenas[memory->count++] = arena;
    *opened = arena;
    return LZ_OK;
}

static void close_arena(lzi_memory *memory, lzi_arena *arena) {
    retire(memory, arena);
    for (size_t i = 0; i < memory->count; i++)
        if (memory->arenas[i] == arena)
            memory->arenas[i--] = memory->arenas[--memory->count];
    unmap(arena);
}

/* The first part of a free block; NULL where none is large enough. */
static lzi_block *take_from(lzi_arena *arena, uint64_t nbytes) {
    lzi_block *block = arena->first;
    while (block && !(block->is_free && block->nbytes >= nbytes))
        block = block->after;
    if (block && block->nbytes > nbytes) {
        lzi_block *rest = calloc(1, sizeof *rest);
        if (!rest)
            return NULL;
        *rest = (lzi_block){
            .arena = arena,
            .before = block,
            .after = block->after,
            .offset = block->offset + nbytes,
            .nbytes = block->nbytes - nbytes,
            .is_free = true,
        };
        if (rest->after)
            rest->after->before = rest;
        block->after = rest;
        block->nbytes = nbytes;
    }
    if (block)
        block->is_free = block->is_given = false;
    return block;
}

/* A block and its neighbour behind it, both free, become one. */
static void unite(lzi_block *block) {
    lzi_block *after = block->after;
    if (!block->is_free || !after || !after->is_free)
        return;
    block->nbytes += after->nbytes;
    block->after = after->after;
    if (block->after)
        block->after->before = block;
    free(after);
}

static void give(lzi_memory *memory, lzi_block *block) {
    lzi_arena *arena = block->arena;
    block->is_free = true;
    unite(block);
    if (block->before)
        unite(block->before);
    if (!is_empty(arena))
        return;
    bool has_other = false; /* one that is empty is kept for what comes next */
    for (size_t i = 0; i < memory->count; i++)
        has_other |= memory->arenas[i] != arena && memory->arenas[i]->is_shared && is_empty(memory->arenas[i]);
    if (!arena->is_shared || has_other)
        close_arena(memory, arena);
}

lz_code lzi_memory_take(lzi_memory *memory, size_t nbytes, void **data, lz_error *error) {
    if (nbytes > MAX_ARENA_BYTES)
        return lzi_fail(error, LZ_INVALID_ARGUMENT, "Ask for at most 2^46 bytes; this was %zu", nbytes);
    uint64_t size = nbytes ? ((uint64_t)nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT : ALIGNMENT;
    uint64_t most = FIRST_ARENA_BYTES / 2;
    bool is_own = size >= OWN_ARENA_BYTES;
    lzi_block *block = NULL;
    lz_code code = LZ_OK;
    pthread_mutex_lock(&memory->lock);
    for (size_t i = 0; !is_own && !block && i < memory->count; i++) {
        lzi_arena *arena = memory->arenas[i];
        if (!arena->is_shared)
            continue;
        most = arena->nbytes > most ? arena->nbytes : most;
        block = take_from(arena, size);
    }
    if (!block) {
        lzi_arena *arena = NULL;
        uint64_t shared = 2 * most < MAX_SHARED_ARENA_BYTES ? 2 * most : MAX_SHARED_ARENA_BYTES;
        uint64_t pages = (size + 4095) / 4096 * 4096;
        code = open_arena(memory, is_own || pages > shared ? pages : shared, !is_own, &arena, error);
        if (!code && !(block = take_from(arena, size)))
            code = lzi_fail(error, LZ_NO_MEMORY, "Free memory, then try again.\nThere is none for a block's record");
    }
    if (block) {
        block->wanted = nbytes;
        *data = block->arena->mapped + block->offset;
    }
    pthread_mutex_unlock(&memory->lock);
    return code;
}

/* The block that holds this address. */
static lzi_block *find(lzi_memory *memory, const void *data) {
    uintptr_t address = (uintptr_t)data;
    for (size_t i = 0; i < memory->count; i++) {
        lzi_arena *arena = memory->arenas[i];
        uintptr_t begin = (uintptr_t)arena->mapped;
        if (address < begin || address - begin >= arena->nbytes)
            continue;
        lzi_block *block = arena->first;
        while (address - begin >= block->offset + block->nbytes)
            block = block->after;
        return block->is_free || block->is_given ? NULL : block;
    }
    return NULL;
}

lzi_block *lzi_pin(lzi_memory *memory, const void *data, uint64_t nbytes, lzi_ref *ref) {
    pthread_mutex_lock(&memory->lock);
    lzi_block *block = find(memory, data);
    if (block) {
        uint64_t offset = (uint64_t)((const char *)data - block->arena->mapped), within = offset - block->offset;
        if (within > block->wanted || nbytes > block->wanted - within) {
            block = NULL;
        } else {
            block->pins++;
            *ref = (lzi_ref){block->arena->number, 0, offset, nbytes};
        }
    }
    pthread_mutex_unlock(&memory->lock);
    return block;
}

void lzi_unpin(lzi_memory *memory, lzi_block *block) {
    pthread_mutex_lock(&memory->lock);
    if (!--block->pins && block->is_given)
        give(memory, block);
    pthread_mutex_unlock(&memory->lock);
}

lz_code lzi_memory_give(lzi_memory *memory, void *data, lz_error *error) {
    lz_code code = LZ_OK;
    pthread_mutex_lock(&memory->lock);
    lzi_block *block = find(memory, data);
    if (!block || (char *)data != block->arena->mapped + block->offset)
        code = lzi_fail(error, LZ_INVALID_ARGUMENT,
                        "Give back what lz_alloc of this client has returned, once.\n%p is no "
                        "such block",
                        data);
    else if (block->pins)
        block->is_given = true;
    else
        give(memory, block);
    pthread_mutex_unlock(&memory->lock);
    return code;
}

void lzi_memory_close(lzi_memory *memory) {
    while (memory->count)
        unmap(memory->arenas[--memory->count]);
    free(memory->arenas);
    memory->arenas = NULL;
    memory->room = 0;
}
