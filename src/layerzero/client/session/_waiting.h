/* The client's side of a lane's page, and the wait for a call's end: watched for as long as that usually takes, then slept for. Each
   word is read once. As ipc/shm/lane.py and ipc/spinning.py have it; after _call_key.h, whose loads it uses. */

#include <poll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { EPOCH = 0, IS_ENDED = 8, CALL = 128, PLAN = 136, CALL_BYTES = 144, WATCHES = 152, CALL_BODY = 256 }; /* bytes; ipc/shm/lane.py */
enum { DONE = 2048, STATUS = 2056, KERNEL_NS = 2064, WORD_BYTES = 2072, MAX_CALL_BYTES = 1024, MAX_WORD_BYTES = 1792, OK = 0 };
enum { LOOKS = 64, MAX_RINGS = 64, MAX_MISSED = 63 };
static const uint64_t LOOK_AGAIN_NS = 1000000, MARGIN = 4, SLACK_NS = 20000;
static const uint64_t EARLY_NS = 120000, LEAST_SLEEP_NS = 30000; /* sleeping takes longer than asked */

typedef struct {
    uint64_t usual_ns; /* until a call is seen to be over that is watched */
    uint32_t missed, skipped; /* calls that are not watched for after watching was in vain; those of them so far */
} Watch;

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static void store64(uint64_t at, uint64_t value) { __atomic_store_n((uint64_t *)at, value, __ATOMIC_RELEASE); }

/* The call's number last: the worker may watch for it. */
static void put_call(uint64_t page, int doorbell, uint64_t call, uint64_t plan, uint64_t nbytes, int watches) {
    uint64_t one = 1;
    store64(page + PLAN, plan);
    store64(page + CALL_BYTES, nbytes);
    store64(page + WATCHES, (uint64_t)watches);
    store64(page + CALL, call);
    if (write(doorbell, &one, 8) < 0) { /* it is rung already */
    }
}

static int is_over(uint64_t page, uint64_t call) { return load64(page + DONE) >= call || load64(page + IS_ENDED); }

static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Until the call is over, or somebody else must look what became of it: who is interrupted, hung up on or out of time. While
   it watches the page nobody needs to ring. That it watches no longer the worker may not see at once: it looks again soon.
   How long it watched until it was over; 0 when it slept. */
static uint64_t await_end(uint64_t page, int answer, int control, uint64_t call, uint64_t spin_ns, uint64_t due) {
    uint64_t start = now_ns(), now = start;
    while (now - start < spin_ns) {
        for (int n = 0; n < LOOKS; n++) {
            if (is_over(page, call)) return now_ns() - start + 1;
            relax();
        }
        now = now_ns();
    }
    if (spin_ns) {
        store64(page + WATCHES, 0);
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
    }
    uint64_t again = spin_ns ? now + LOOK_AGAIN_NS : due;
    for (int rings = 0; rings < MAX_RINGS && !is_over(page, call) && (now = now_ns()) < due;) {
        struct pollfd bells[2] = {{answer, POLLIN, 0}, {control, POLLRDHUP, 0}};
        uint64_t until = again > now && again < due ? again : due;
        uint64_t left_ms = (until - now) / 1000000 + 1;
        char rung;
        if (poll(bells, 2, left_ms < 1000000 ? (int)left_ms : 1000000) < 0) return 0;
        if (bells[0].revents & POLLIN) {
            rings++;
            if (recv(answer, &rung, 1, MSG_DONTWAIT) < 0) { /* the page says what is so */
            }
        }
        if (bells[1].revents || bells[0].revents & ~POLLIN) return 0;
    }
    return 0;
}

/* As await_end, of a call that is expected to take so long: it is watched for only from shortly before. Until then nobody rings, nor
   needs to, unless the other side hangs up. */
static uint64_t await_expected(uint64_t page, int answer, int control, uint64_t call, uint64_t expected_ns, uint64_t spin_ns,
                               uint64_t due) {
    if (spin_ns && expected_ns > EARLY_NS + LEAST_SLEEP_NS) {
        struct pollfd hang_up = {control, POLLRDHUP, 0};
        uint64_t left_ns = expected_ns - EARLY_NS;
        struct timespec left = {(time_t)(left_ns / 1000000000), (long)(left_ns % 1000000000)};
        if (ppoll(&hang_up, 1, &left, NULL)) return 0; /* or a signal */
    }
    return await_end(page, answer, control, call, spin_ns, due);
}

/* How long a call is to be watched for, within `most`. Where the last ones were not over in that time, it is tried again after
   ever more of them, and for long, since the other side sleeps by then. */
static uint64_t wanted_ns(Watch *watch, uint64_t most) {
    if (!most || watch->skipped < watch->missed) {
        watch->skipped++;
        return 0;
    }
    uint64_t wanted = watch->usual_ns && !watch->missed ? MARGIN * watch->usual_ns + SLACK_NS : most;
    return wanted < most ? wanted : most;
}

static void note_watch(Watch *watch, uint64_t seen_ns) {
    watch->skipped = 0;
    if (!seen_ns)
        watch->missed = watch->missed < MAX_MISSED ? 2 * watch->missed + 1 : MAX_MISSED;
    else
        watch->missed /= 2, watch->usual_ns = watch->usual_ns ? (3 * watch->usual_ns + seen_ns) / 4 : seen_ns;
}
