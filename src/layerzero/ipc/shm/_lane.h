/* The express lane's page and bells in C: as ipc/shm/lane.py and ipc/spinning.py have them, for both ends, ../../client/session/_waiting.h
   and ../../workers/_serving.c. Python compares the layout. Each word is read once. */

#include <fcntl.h>
#include <linux/futex.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "_words.h"

enum { EPOCH = 0, IS_ENDED = 8, CALL = 128, WAITS = 136, NAPS = 144, DONE = 256, WAKES = 272 }; /* bytes of the page; ipc/shm/lane.py */
enum { HEAD_BYTES = 4096, PLACE_BYTES = 3200, NUMBER = 0, PLAN = 8, CALL_BYTES = 16, REFS_AT = 128, END_AT = 1152 };
enum { STATUS = END_AT + 8, KERNEL_NS = END_AT + 16, WORD_BYTES = END_AT + 24, END_PLAN = END_AT + 32, SAID_AT = END_AT + 128 };
enum { MAX_CALL_BYTES = 1024, MAX_WORD_BYTES = 1792, OK = 0, DECLINED = 2, DEPTH = 64 };
enum { LOOKS = 64, MAX_MISSED = 63 };
static const uint64_t NO_PLAN = UINT64_MAX; /* of a call that was withdrawn */
static const uint64_t MARGIN = 4, SLACK_NS = 20000, CORES_HOLD_NS = 10000000;

#define LANE_LAYOUT EPOCH, IS_ENDED, CALL, WAITS, NAPS, DONE, WAKES, HEAD_BYTES, PLACE_BYTES, NUMBER, PLAN, CALL_BYTES, REFS_AT, END_AT, \
    MAX_CALL_BYTES, MAX_WORD_BYTES, OK, DEPTH

/* How long it is watched for the other side. */
typedef struct {
    uint64_t usual_ns; /* until the other side is seen that is watched for */
    uint32_t missed, skipped; /* waits without a watch after watching was in vain; those of them so far */
} Watch;

static inline uint64_t place_of(uint64_t page, uint64_t call) { return page + HEAD_BYTES + (call - 1) % DEPTH * PLACE_BYTES; }

/* Take a ring, by a flag of this one read: it never waits, whatever was made of the doorbell. */
static inline int take_ring(int doorbell) {
    uint64_t rings;
    struct iovec one = {&rings, 8};
    return preadv2(doorbell, &one, 1, -1, RWF_NOWAIT) == 8;
}

/* --- client: as Page of lane.py; ringing comes after. */

/* Write a call into its place, which is free. */
static inline void put_call(uint64_t page, uint64_t call, uint64_t plan, const char *body, uint64_t nbytes) {
    uint64_t at = place_of(page, call);
    memcpy((char *)at + REFS_AT, body, nbytes);
    store64(at + PLAN, plan);
    store64(at + CALL_BYTES, nbytes);
    store64(at + NUMBER, call);
    store64(page + CALL, call); /* last: the worker may watch for it */
}

/* Take rings back down to this call's, where `last` was put last: whether the worker cannot claim it any more, and will decline it.
   `taken`: so many are to be rung for again. */
static inline int withdraw_call(uint64_t page, int doorbell, uint64_t call, uint64_t last, uint64_t *taken) {
    uint64_t behind = last - call + 1;
    for (*taken = 0; *taken < behind && take_ring(doorbell);) ++*taken;
    if (!behind || *taken < behind) return 0;
    store64(place_of(page, call) + PLAN, NO_PLAN);
    return 1;
}

/* What a worker says of a call that it has ended; behind it so many bytes at SAID_AT of the place. */
typedef struct {
    uint64_t status, kernel_ns, nbytes;
} End;

/* Whether a call has ended; -1 when its end makes no sense. */
static inline int get_end(uint64_t page, uint64_t call, End *end) {
    uint64_t at = place_of(page, call), found = load64(at + END_AT);
    if (found < call && load64(page + DONE) < call) return 0;
    if (found != call && load64(at + END_AT) != call) return -1; /* else it was written just now */
    end->status = load64(at + STATUS), end->nbytes = load64(at + WORD_BYTES), end->kernel_ns = load64(at + KERNEL_NS);
    return end->status > DECLINED || end->nbytes > MAX_WORD_BYTES ? -1 : 1;
}

/* --- worker */

/* The end of a call that says nothing but that. */
static inline void put_end(uint64_t page, uint64_t call, uint64_t status, uint64_t plan, uint64_t kernel_ns) {
    uint64_t at = place_of(page, call);
    store64(at + STATUS, status);
    store64(at + KERNEL_NS, kernel_ns);
    store64(at + WORD_BYTES, 0);
    store64(at + END_PLAN, plan);
    store64(at + END_AT, call);
    store64(page + DONE, call);
}

/* Wake who sleeps until this call has ended: its end is on the page. */
static inline void tell(uint64_t page, int answer, uint64_t call) {
    uint64_t naps, waits;
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    naps = load64(page + NAPS), waits = load64(page + WAITS);
    if (naps && naps <= call) syscall(SYS_futex, (uint32_t *)(page + DONE), FUTEX_WAKE, 1, NULL, NULL, 0);
    if (waits && waits <= call && send(answer, "\1", 1, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) { /* rung already, or nobody hears it */
    }
}

/* --- how long either watches for the other */

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Whether there is a core for each process that wants to run: asked for now and then. */
typedef struct {
    uint64_t count; /* that this process may use; 0: it never watches */
    uint64_t asked_ns;
    int are_free; /* as of then */
} Cores;

/* No Python is run for it: there a signal's handler may raise, which nobody here could pass on. */
static inline int are_free(Cores *cores, uint64_t now_ns) {
    if (now_ns - cores->asked_ns <= CORES_HOLD_NS) return cores->are_free;
    char text[128], *running;
    int fd = cores->count < 2 ? -1 : open("/proc/loadavg", O_RDONLY | O_CLOEXEC);
    ssize_t size = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
    if (fd >= 0) close(fd);
    text[size > 0 ? size : 0] = 0;
    running = text;
    for (int word = 0; word < 3 && running; word++) running = strchr(running, ' '), running += running != NULL;
    uint64_t count = running ? strtoull(running, NULL, 10) : 0;
    cores->are_free = count && count <= cores->count, cores->asked_ns = now_ns;
    return cores->are_free;
}

/* How long to watch, within `most`: not at all while others want the cores. Where the last watches were in vain, it is tried again after ever more waits, and for long, since
   the other side sleeps by then. */
static inline uint64_t wanted_ns(Watch *watch, Cores *cores, uint64_t most) {
    if (!most || watch->skipped < watch->missed) {
        watch->skipped++;
        return 0;
    }
    if (!are_free(cores, clock_ns())) return 0;
    uint64_t wanted = watch->usual_ns && !watch->missed ? MARGIN * watch->usual_ns + SLACK_NS : most;
    return wanted < most ? wanted : most;
}

/* `seen_ns`: 0 for a watch in vain. */
static inline void note_watch(Watch *watch, uint64_t seen_ns) {
    watch->skipped = 0;
    if (!seen_ns)
        watch->missed = watch->missed < MAX_MISSED ? 2 * watch->missed + 1 : MAX_MISSED;
    else
        watch->missed /= 2, watch->usual_ns = watch->usual_ns ? (3 * watch->usual_ns + seen_ns) / 4 : seen_ns;
}
