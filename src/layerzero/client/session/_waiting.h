/* A lane of the client's: calls that it has put there, and threads that wait for their ends.

   One of the threads that wait leads: it watches the page, sleeps on a word of it for a moment, then until a bell rings, and wakes the
   others when their calls are over. Who leads no longer hands that over. Each word of the page is read once.

   There is no Python in it: c/src/lane.c is compiled of it, too. What is on the page is guarded by a lock of the client's, which nobody
   holds who waits: in Python's client that of the interpreter. */

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>

#include "../../ipc/shm/_lane.h"

static const uint64_t LOOK_AGAIN_NS = 1000000, LONG_NS = 1000000000, NOT_WATCHED = UINT64_MAX;
static const uint64_t EARLY_NS = 120000, LEAST_SLEEP_NS = 30000; /* sleeping takes longer than asked */
static const uint64_t TOGETHER_NS = 100000, BESIDE_NS = 4000; /* so long may an end wait for later ones to be told with it; of each call */

static const uint64_t PATIENCE_NS = 1000000000; /* with threads that owe a ring */

enum { SLEEPS, LOOK, LEAD };
typedef struct Waiter {
    struct Waiter *next;
    uint64_t call;
    uint32_t word; /* what it is woken for */
} Waiter;

/* What threads of a lane share while they wait; under its lock. */
typedef struct {
    pthread_mutex_t lock;
    Waiter *waiters; /* but the one that leads */
    int is_led;
    uint64_t page;
    int doorbell, answer, control;
    int is_closed;
    uint64_t owed; /* rings of threads that have let go of the client's lock to make them */
} Bells;

static inline int is_over(uint64_t page, uint64_t call) {
    return load64(page + DONE) >= call || load64(place_of(page, call) + END_AT) >= call || load64(page + IS_ENDED);
}

static inline void ring(int doorbell, uint64_t times) {
    if (write(doorbell, &times, 8) < 0) { /* nobody listened 2**64 times */
    }
}

/* Who is to ring without the client's lock says so while it has that. */
static inline void owe(Bells *bells, uint64_t times) { __atomic_fetch_add(&bells->owed, times, __ATOMIC_RELAXED); }

static inline void pay(Bells *bells, uint64_t times) {
    ring(bells->doorbell, times);
    __atomic_fetch_sub(&bells->owed, times, __ATOMIC_RELEASE);
}

enum { CLAIMED, TAKEN_BACK, UNKNOWN_YET };

/* Whether a call is the worker's or was taken back. UNKNOWN_YET while rings are owed that might be this call's. With the client's
   lock; `taken` rings are owed by the caller then. */
static inline int take_back(Bells *bells, uint64_t call, uint64_t last, uint64_t *taken) {
    uint64_t owed = __atomic_load_n(&bells->owed, __ATOMIC_ACQUIRE);
    int is_ours = withdraw_call(bells->page, bells->doorbell, call, last, taken);
    owe(bells, *taken);
    return is_ours ? TAKEN_BACK : owed ? UNKNOWN_YET : CLAIMED;
}

static inline void wake(Waiter *waiter, uint32_t word) {
    __atomic_store_n(&waiter->word, word, __ATOMIC_RELEASE);
    syscall(SYS_futex, &waiter->word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

/* Wake those whose calls are over. The least call of the others; 0 when there are none. */
static inline uint64_t wake_others(Bells *bells) {
    uint64_t least = 0;
    pthread_mutex_lock(&bells->lock);
    for (Waiter **at = &bells->waiters; *at;) {
        Waiter *one = *at;
        if (__atomic_load_n(&bells->is_closed, __ATOMIC_RELAXED) || is_over(bells->page, one->call)) {
            __atomic_store_n(at, one->next, __ATOMIC_RELAXED); /* who leads looks without the lock whether there are some */
            wake(one, LOOK);
        } else {
            if (!least || one->call < least) least = one->call;
            at = &one->next;
        }
    }
    pthread_mutex_unlock(&bells->lock);
    return least;
}

/* The worker is to tell of the end of this call, too: where it is to tell of a later one, as of now. Under the lock. */
static inline void want(Bells *bells, uint64_t call) {
    static const uint64_t words[] = {WAITS, NAPS};
    for (int n = 0; n < 2; n++) {
        uint64_t at = bells->page + words[n], wanted = load64(at);
        if (call && wanted && call < wanted) store64(at, call);
    }
}

/* The call whose end the worker is to ring for. Where short calls follow a lone waiter's, it is told of some of them at once. */
static inline uint64_t wanted_call(Bells *bells, uint64_t call, uint64_t others) {
    uint64_t page = bells->page, last = load64(page + CALL), done = load64(page + DONE);
    if (others) return others < call ? others : call;
    if (last <= call || last - call > DEPTH || !done) return call;
    uint64_t kernel_ns = load64(place_of(page, done) + KERNEL_NS), ahead = (last - call) / 2;
    uint64_t together = kernel_ns < TOGETHER_NS ? TOGETHER_NS / (kernel_ns + BESIDE_NS) : 0;
    return call + (ahead < together ? ahead : together);
}

/* Watch the page, for that long at most. How long it was until the call was over; 0: it is not. */
static inline uint64_t glance(uint64_t page, uint64_t call, uint64_t within_ns) {
    uint64_t start = clock_ns(), now = start;
    while (now - start < within_ns) {
        for (int n = 0; n < LOOKS; n++) {
            if (is_over(page, call)) return clock_ns() - start + 1;
            relax();
        }
        now = clock_ns();
    }
    return 0;
}

/* Sleep on the word of what is done until that moves, not for long: nothing else is heard of. Whether it was not interrupted. */
static inline int nap(uint64_t page, uint64_t done, uint64_t most_ns) {
    struct timespec time = {0, (long)most_ns};
    return syscall(SYS_futex, (uint32_t *)(page + DONE), FUTEX_WAIT, (uint32_t)done, &time, NULL, 0) == 0 || errno != EINTR;
}

/* Until the call is over, or somebody else must look what became of it: who is interrupted, hung up on or out of time. While
   it watches the page nobody needs to ring. That it watches no longer the worker may not see at once: it looks again soon.
   How long it watched until it was over; 0 when it slept. */
static inline uint64_t lead(Bells *bells, uint64_t call, uint64_t spin_ns, uint64_t due) {
    uint64_t start = clock_ns(), now = start, page = bells->page, done = 0, others;
    while (now - start < spin_ns) {
        for (int n = 0; n < LOOKS; n++) {
            if (is_over(page, call)) return clock_ns() - start + 1;
            relax();
        }
        if (load64(page + DONE) != done && __atomic_load_n(&bells->waiters, __ATOMIC_ACQUIRE)) done = load64(page + DONE), wake_others(bells);
        now = clock_ns();
    }
    uint64_t look_at = now + LOOK_AGAIN_NS;
    for (int is_first = 1; now < due; now = clock_ns(), is_first = 0) {
        int naps = now < look_at && load64(page + WAKES);
        others = wake_others(bells);
        store64(page + (naps ? NAPS : WAITS), is_first ? wanted_call(bells, call, others) : others && others < call ? others : call);
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
        done = load64(page + DONE);
        if ((others = wake_others(bells))) { /* one may have come, or a call have ended, before the worker could see that */
            pthread_mutex_lock(&bells->lock);
            want(bells, others);
            pthread_mutex_unlock(&bells->lock);
            __atomic_thread_fence(__ATOMIC_SEQ_CST);
        }
        if (is_over(page, call) || __atomic_load_n(&bells->is_closed, __ATOMIC_ACQUIRE)) break;
        uint64_t most = now < look_at ? look_at - now : LONG_NS, left = due - now < most ? due - now : most;
        if (naps) {
            int goes_on = nap(page, done, left);
            store64(page + NAPS, 0);
            if (!goes_on || is_over(page, call)) break;
            continue;
        }
        struct pollfd both[2] = {{bells->answer, POLLIN, 0}, {bells->control, POLLRDHUP, 0}};
        char rung;
        int rang = poll(both, 2, (int)((left + 999999) / 1000000));
        if (rang < 0 || (!rang && left == LONG_NS)) break; /* a signal may have come before it slept: that is the caller's to find out */
        if (both[0].revents & POLLIN && recv(bells->answer, &rung, 1, MSG_DONTWAIT) < 0) { /* the page says what is so */
        }
        if (is_over(page, call) || both[1].revents || both[0].revents & ~POLLIN) break;
    }
    store64(page + NAPS, 0);
    store64(page + WAITS, 0);
    return 0;
}

static inline void resign(Bells *bells) {
    wake_others(bells);
    pthread_mutex_lock(&bells->lock);
    Waiter *next = bells->waiters;
    bells->is_led = next != NULL;
    if (next) {
        __atomic_store_n(&bells->waiters, next->next, __ATOMIC_RELAXED);
        wake(next, LEAD);
    }
    pthread_mutex_unlock(&bells->lock);
}

/* As `lead`, with others; NOT_WATCHED for who did not lead from the start: only such a one watches, for `spin_ns`. */
static inline uint64_t wait_for(Bells *bells, uint64_t call, uint64_t spin_ns, uint64_t due) {
    Waiter me = {NULL, call, SLEEPS};
    uint64_t now = clock_ns(), slice = LOOK_AGAIN_NS;
    if (is_over(bells->page, call)) return spin_ns != 0;
    pthread_mutex_lock(&bells->lock);
    int leads = !bells->is_led;
    bells->is_led = 1;
    if (!leads) {
        me.next = bells->waiters;
        __atomic_store_n(&bells->waiters, &me, __ATOMIC_RELEASE);
        want(bells, call);
    }
    pthread_mutex_unlock(&bells->lock);
    if (!leads) {
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
        while (!__atomic_load_n(&me.word, __ATOMIC_ACQUIRE) && !is_over(bells->page, call) && now < due) {
            uint64_t left = due - now < slice ? due - now : slice;
            struct timespec time = {(time_t)(left / 1000000000), (long)(left % 1000000000)};
            if (syscall(SYS_futex, &me.word, FUTEX_WAIT_PRIVATE, SLEEPS, &time, NULL, 0) < 0 && (errno == EINTR || left == LONG_NS)) break;
            now = clock_ns(), slice = LONG_NS;
        }
        pthread_mutex_lock(&bells->lock);
        for (Waiter **at = &bells->waiters; *at; at = &(*at)->next)
            if (*at == &me) {
                __atomic_store_n(at, me.next, __ATOMIC_RELAXED);
                break;
            }
        pthread_mutex_unlock(&bells->lock);
        if (me.word != LEAD) return NOT_WATCHED;
        spin_ns = 0;
    }
    uint64_t seen_ns = lead(bells, call, spin_ns, due);
    resign(bells);
    return leads ? seen_ns : NOT_WATCHED;
}

/* Before a call is waited for, until it is `due`, that is expected to take so long by what its worker said. Nobody rings, nor needs to,
   unless the other side hangs up. */
static inline void sleep_before(Bells *bells, uint64_t expected_ns, uint64_t due) {
    struct pollfd hang_up = {bells->control, POLLRDHUP, 0};
    uint64_t now = clock_ns(), left_ns = expected_ns - EARLY_NS;
    if (now >= due) return;
    if (left_ns > due - now) left_ns = due - now;
    struct timespec left = {(time_t)(left_ns / 1000000000), (long)(left_ns % 1000000000)};
    ppoll(&hang_up, 1, &left, NULL); /* or a signal */
}
