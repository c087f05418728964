/* Every word that a client's threads and a worker exchange over an express lane, in any order that the processor allows.

   What runs is the code itself, ipc/shm/_lane.h and client/session/_waiting.h, with its loads, stores, barriers and system calls
   redirected: each is a point where another thread may go on. Threads are coroutines; a seed chooses who is next. Stores wait in a
   buffer of their thread, as on x86, until a barrier or a system call, or until chance lets one through. The clock stands while
   somebody can run. So a schedule is its seed, and a failure says it again: `lane SEED 1`.

   Usage: lane FIRST COUNT [BUG]. Prints what happened in how many schedules; the first broken promise ends it, with exit code 1:

   - somebody sleeps although what it waits for is there, and only its time limit would wake it;
   - a call runs twice, or although it was taken back, or with another call's references, or out of order;
   - a client reads an end that is not its call's, or none where there is one;
   - a worker that died leaves more than one call of which nobody knows whether it ran;
   - nothing can go on. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#define ULL(value) ((unsigned long long)(value))

/* --- threads, store buffers, and what the kernel does */

enum { CLIENTS = 3, WORKER = CLIENTS, BROKER, THREADS, STACK = 64 << 10, BUFFER = 32, MOST_CALLS = 128, MOST_STEPS = 1000000 };
enum { DOORBELL = 100, ANSWER, CONTROL };
enum { READY, WAITS_FUTEX, WAITS_POLL, WAITS_RING, WAITS_LOCK, WAITS_DEATH, ENDED };
enum { NO_BUG, NO_BARRIER, SILENT_END, NUMBER_FIRST, DOUBLE_RING, BLIND_WITHDRAWAL, FORGETS_OWED, BUGS };
static const char *const BUG_NAMES[BUGS] = {"", "no_barrier", "silent_end", "number_first", "double_ring", "blind_withdrawal", "forgets_owed"};

typedef struct {
    uint64_t at, value;
} Store;

typedef struct {
    ucontext_t context;
    char stack[STACK];
    Store buffer[BUFFER];
    int stored, state, was_woken;
    uint64_t due_ns; /* of its sleep; 0: none */
    const void *waits_at; /* a futex or a lock */
    uint64_t call; /* a client's: the one that it waits for */
} Thread;

static Thread threads[THREADS];
static ucontext_t scheduler;
static int current, bug, is_dead;
static uint64_t seed, now_ns, rings, bells, random_state, steps, ways[7];
static uint64_t page_words[(4096 + 64 * 3200) / 8];
enum { W_RAN, W_DECLINED, W_TAKEN_BACK, W_LOST, W_LATE, W_NAPPED, W_POLLED, WAYS };
static const char *const WAY_NAMES[] = {"ran", "declined", "taken back", "lost", "out of time", "naps", "waits for the bell"};

__attribute__((noreturn, format(printf, 1, 2))) static void broken(const char *what, ...) {
    va_list args;
    va_start(args, what);
    printf("seed %llu, step %llu: ", ULL(seed), ULL(steps));
    vprintf(what, args);
    printf("\n");
    fflush(stdout);
    _exit(1);
}

static uint64_t chance(uint64_t below) { /* xorshift64* */
    random_state ^= random_state >> 12, random_state ^= random_state << 25, random_state ^= random_state >> 27;
    return (random_state * 2685821657736338717ULL >> 33) % below;
}

static void drain_one(Thread *thread) {
    *(uint64_t *)thread->buffer[0].at = thread->buffer[0].value;
    memmove(thread->buffer, thread->buffer + 1, sizeof(Store) * (size_t)--thread->stored);
}

static void drain(Thread *thread) {
    while (thread->stored) drain_one(thread);
}

static void yield(void) {
    swapcontext(&threads[current].context, &scheduler);
}

static void block(int state, const void *at, uint64_t due_ns) {
    Thread *me = &threads[current];
    me->state = state, me->waits_at = at, me->due_ns = due_ns, me->was_woken = 0;
    yield();
    me->due_ns = 0;
}

static void wake_one(Thread *thread) { thread->state = READY, thread->was_woken = 1; }

/* --- in place of what the headers call */

static uint64_t sim_load64(uint64_t at) {
    Thread *me = &threads[current];
    yield();
    for (int n = me->stored; n--;)
        if (me->buffer[n].at == at) return me->buffer[n].value;
    return *(const uint64_t *)at;
}

static void sim_store64(uint64_t at, uint64_t value) {
    Thread *me = &threads[current];
    yield();
    if (me->stored == BUFFER) drain_one(me);
    me->buffer[me->stored++] = (Store){at, value};
}

static void sim_fence(void) {
    if (bug == NO_BARRIER) return;
    yield();
    drain(&threads[current]);
}

static uint64_t sim_clock_ns(void) {
    yield();
    return now_ns += 50;
}

/* Every system call is a barrier. */
static void enter(void) {
    yield();
    drain(&threads[current]);
}

static long sim_syscall(long number, uint32_t *at, int op, uint32_t value, const struct timespec *time, void *unused, int unused_too) {
    (void)unused, (void)unused_too;
    if (number != SYS_futex) broken("system call %ld", number);
    enter();
    if ((op & ~FUTEX_PRIVATE_FLAG) == FUTEX_WAKE) {
        for (int n = 0; n < THREADS; n++)
            if (threads[n].state == WAITS_FUTEX && threads[n].waits_at == at) {
                wake_one(&threads[n]);
                break;
            }
        return 0;
    }
    if (*at != value) return errno = EAGAIN, -1;
    if (!chance(40)) return errno = EINTR, -1;
    ways[W_NAPPED] += !(op & FUTEX_PRIVATE_FLAG);
    block(WAITS_FUTEX, at, now_ns + (uint64_t)time->tv_sec * 1000000000 + (uint64_t)time->tv_nsec);
    if (threads[current].was_woken) return 0;
    return errno = ETIMEDOUT, -1;
}

static int sim_poll(struct pollfd *fds, nfds_t count, int timeout_ms) {
    enter();
    if (count != 2 || fds[0].fd != ANSWER || fds[1].fd != CONTROL) broken("a poll of others");
    fds[0].revents = fds[1].revents = 0;
    if (!chance(40)) return errno = EINTR, -1;
    if (!bells) ways[W_POLLED]++, block(WAITS_POLL, NULL, now_ns + 1000000ULL * (uint64_t)timeout_ms);
    fds[0].revents = bells ? POLLIN : 0;
    return bells != 0;
}

static ssize_t sim_recv(int fd, void *data, size_t nbytes, int flags) {
    (void)fd, (void)data, (void)nbytes, (void)flags;
    enter();
    if (!bells) return errno = EAGAIN, -1;
    bells--;
    return 1;
}

static ssize_t sim_send(int fd, const void *data, size_t nbytes, int flags) {
    (void)fd, (void)data, (void)nbytes, (void)flags;
    enter();
    if (bells) return errno = EAGAIN, -1; /* what fits is less than what may come */
    bells = 1;
    for (int n = 0; n < CLIENTS; n++)
        if (threads[n].state == WAITS_POLL) wake_one(&threads[n]);
    return 1;
}

static ssize_t sim_write(int fd, const void *data, size_t nbytes) {
    enter();
    if (fd != DOORBELL || nbytes != 8) broken("a write to another");
    rings += *(const uint64_t *)data;
    if (threads[WORKER].state == WAITS_RING && rings) wake_one(&threads[WORKER]);
    return 8;
}

static ssize_t sim_preadv2(int fd, const struct iovec *one, int count, off_t offset, int flags) {
    enter();
    if (fd != DOORBELL || count != 1 || offset != -1 || flags != RWF_NOWAIT) broken("a read of another");
    if (!rings) return errno = EAGAIN, -1;
    if (!(bug == DOUBLE_RING && !chance(4))) rings--;
    *(uint64_t *)one->iov_base = 1;
    return 8;
}

static int sim_lock(const void *lock, int *holder) {
    enter();
    while (*holder) block(WAITS_LOCK, lock, 0);
    return *holder = 1, 0;
}

static int sim_unlock(const void *lock, int *holder) {
    enter();
    *holder = 0;
    for (int n = 0; n < THREADS; n++)
        if (threads[n].state == WAITS_LOCK && threads[n].waits_at == lock) wake_one(&threads[n]);
    return 0;
}

static int lock_holder, interpreter_holder;
#define load64 real_load64
#define store64 real_store64
#define clock_ns real_clock_ns
#include "../../src/layerzero/ipc/shm/_words.h"
#undef load64
#undef store64
#undef clock_ns
#define load64 sim_load64
#define store64 sim_store64
#define clock_ns sim_clock_ns
#define syscall(number, at, op, value, time, ...) sim_syscall(number, (uint32_t *)(at), op, value, time, __VA_ARGS__)
#define poll sim_poll
#define ppoll(fds, count, time, mask) ((void)(fds), (void)(count), (void)(time), (void)(mask))
#define recv sim_recv
#define send sim_send
#define write sim_write
#define preadv2 sim_preadv2
#define pthread_mutex_lock(lock) sim_lock(lock, &lock_holder)
#define pthread_mutex_unlock(lock) sim_unlock(lock, &lock_holder)
#define __atomic_thread_fence(order) sim_fence()
#define __atomic_load_n(at, order) (yield(), *(at))
#define __atomic_store_n(at, value, order) (enter(), (void)(*(at) = (value)))
#define __atomic_fetch_add(at, value, order) (enter(), *(at) += (value))
#define __atomic_fetch_sub(at, value, order) (enter(), *(at) -= (value))
#include "../../src/layerzero/client/session/_waiting.h"

/* --- a client's threads, a worker, the broker */

enum { OPEN, READ_OK, READ_DECLINED, IS_TAKEN_BACK, IS_LOST };
static Bells line;
static uint64_t put_calls, total, kill_at;
static int has_run[MOST_CALLS + 1], found[MOST_CALLS + 1];
static uint64_t in_place[DEPTH]; /* the call whose end has not been read; 0: it is free */

static void body_of(uint64_t call, char *body) { memset(body, (int)(call * 37 % 251), 16); }

/* As Receipt and Line of client/session/_line.h; under the interpreter's lock. */
static int read_end(uint64_t call) {
    End end;
    if (found[call]) return 1;
    int has_ended = get_end(line.page, call, &end);
    if (has_ended < 0) broken("the end of call %llu makes no sense", ULL(call));
    if (!has_ended) return 0;
    if (in_place[(call - 1) % DEPTH] != call) broken("the place of call %llu was given to another", ULL(call));
    if (end.kernel_ns != 1000 + call) broken("call %llu has the end of another: %llu", ULL(call), ULL(end.kernel_ns));
    in_place[(call - 1) % DEPTH] = 0, found[call] = end.status == OK ? READ_OK : READ_DECLINED;
    if (has_run[call] != (end.status == OK)) broken("call %llu ended with status %llu and ran %d times", ULL(call), ULL(end.status), has_run[call]);
    return 1;
}

/* As Line_withdraw; lets go of the lock. */
static int withdraw(uint64_t call) {
    for (;;) {
        uint64_t taken;
        int whose = found[call] ? CLAIMED : take_back(&line, call, put_calls, &taken);
        if (found[call]) taken = 0;
        if (whose == UNKNOWN_YET && bug == FORGETS_OWED) whose = CLAIMED;
        if (whose == CLAIMED && bug == BLIND_WITHDRAWAL) whose = TAKEN_BACK;
        if (whose == TAKEN_BACK) found[call] = IS_TAKEN_BACK;
        sim_unlock(&interpreter_holder, &interpreter_holder);
        if (taken) pay(&line, taken);
        if (whose != UNKNOWN_YET) return whose == TAKEN_BACK;
        sim_lock(&interpreter_holder, &interpreter_holder);
    }
}

static void run_client(void) {
    Thread *me = &threads[current];
    char body[16];
    while (put_calls < total) {
        sim_lock(&interpreter_holder, &interpreter_holder);
        uint64_t call = put_calls + 1, before = in_place[(call - 1) % DEPTH];
        if (call > total || load64(line.page + IS_ENDED)) {
            sim_unlock(&interpreter_holder, &interpreter_holder);
            break;
        }
        if (before) { /* taken back or given up, and maybe not declined yet: as `put` of _line.h, which finds no room then */
            End end;
            if (get_end(line.page, before, &end) <= 0) {
                sim_unlock(&interpreter_holder, &interpreter_holder);
                wait_for(&line, before, 0, now_ns + 50000000);
                continue;
            }
            in_place[(call - 1) % DEPTH] = 0;
        }
        in_place[(call - 1) % DEPTH] = put_calls = call;
        body_of(call, body);
        put_call(line.page, call, 7, body, sizeof body);
        owe(&line, 1);
        sim_unlock(&interpreter_holder, &interpreter_holder);
        pay(&line, 1);
        uint64_t spin_ns = chance(3) ? 0 : 200 + chance(2000), due = now_ns + 100 + (chance(6) ? 4000000000 : chance(60000));
        int gives_up = !chance(8);
        me->call = call;
        for (;;) { /* as Lane._wait of client/connection/express.py */
            if (!gives_up) wait_for(&line, call, spin_ns, due);
            sim_lock(&interpreter_holder, &interpreter_holder);
            if (read_end(call)) {
                sim_unlock(&interpreter_holder, &interpreter_holder);
                break;
            }
            int has_ended = load64(line.page + IS_ENDED) != 0;
            if (!has_ended && !gives_up && sim_clock_ns() < due) { /* interrupted: on with it */
                sim_unlock(&interpreter_holder, &interpreter_holder);
                continue;
            }
            ways[W_LATE] += !has_ended && !gives_up;
            if (withdraw(call)) break;
            if (has_ended) {
                sim_lock(&interpreter_holder, &interpreter_holder);
                if (!read_end(call)) found[call] = IS_LOST; /* it was claimed; or is not withdrawn as one behind it is claimed, which cannot be */
                sim_unlock(&interpreter_holder, &interpreter_holder);
                break;
            }
            gives_up = 0, spin_ns = 0, due = now_ns + 4000000000; /* the worker has it */
        }
        me->call = 0;
    }
    me->state = ENDED;
    for (;;) yield();
}

/* As serve_next of workers/_serving.c. */
static void run_worker(void) {
    uint64_t claimed = 0, last_run = 0;
    char body[16];
    *(uint64_t *)(line.page + WAKES) = chance(4) != 0;
    for (;;) {
        if (!take_ring(DOORBELL)) {
            enter();
            if (!rings) block(WAITS_RING, NULL, 0);
            continue;
        }
        uint64_t call = claimed + 1, at = place_of(line.page, call);
        if (load64(at + NUMBER) != call) broken("the worker has a ring for call %llu, which is not there", ULL(call));
        uint64_t plan = load64(at + PLAN), nbytes = load64(at + CALL_BYTES);
        claimed = call;
        body_of(call, body);
        int runs = plan != NO_PLAN;
        if (runs) {
            if (plan != 7 || nbytes != sizeof body || memcmp((const char *)at + REFS_AT, body, sizeof body)) broken("call %llu has the references of another", ULL(call));
            if (found[call] == IS_TAKEN_BACK) broken("call %llu was taken back and runs", ULL(call));
            if (has_run[call]++ || call <= last_run) broken("call %llu runs again", ULL(call));
            last_run = call;
            for (uint64_t n = chance(12); n--;) yield(); /* its kernel */
        }
        if (bug == NUMBER_FIRST) store64(at + END_AT, call);
        put_end(line.page, call, runs ? OK : DECLINED, runs ? plan : 0, 1000 + call);
        if (bug == SILENT_END && !chance(3)) continue;
        tell(line.page, ANSWER, call);
    }
}

static void run_broker(void) {
    if (!is_dead) block(WAITS_DEATH, NULL, 0);
    sim_store64(line.page + IS_ENDED, 1);
    enter();
    sim_send(ANSWER, "\1", 1, 0);
    threads[current].state = ENDED;
    for (;;) yield();
}

/* --- one schedule */

static void start(int number, void (*run)(void)) {
    Thread *thread = &threads[number];
    getcontext(&thread->context);
    thread->context.uc_stack.ss_sp = thread->stack, thread->context.uc_stack.ss_size = STACK;
    thread->stored = 0, thread->state = READY, thread->due_ns = 0, thread->call = 0;
    makecontext(&thread->context, run, 0);
}

/* Everybody sleeps. Whose sleep ends first by its time limit, and whether it should have been woken. */
static int wake_by_time(void) {
    int first = -1;
    for (int n = 0; n < THREADS; n++) drain(&threads[n]);
    if (threads[WORKER].state == WAITS_RING && rings && !is_dead) broken("the worker sleeps, and has %llu rings", ULL(rings));
    int naps = 0;
    for (int n = 0; n < CLIENTS; n++) naps |= threads[n].due_ns && threads[n].waits_at == (const void *)(line.page + DONE);
    for (int n = 0; n < CLIENTS; n++) {
        Thread *one = &threads[n];
        if (!one->due_ns) continue;
        uint64_t done = page_words[DONE / 8];
        if (one->call && (done >= one->call || page_words[IS_ENDED / 8]) && !(naps && is_dead)) /* who naps hears of no death, for a millisecond */
            broken("thread %d %s, and call %llu is over, of %llu that have ended; waits %llu, naps %llu, bells %llu%s", n,
                   one->state == WAITS_POLL ? "waits for the bell" : naps ? "naps" : "waits for who leads", ULL(one->call), ULL(done),
                   ULL(page_words[WAITS / 8]), ULL(page_words[NAPS / 8]), ULL(bells), is_dead ? "; the worker is dead" : "");
        if (first < 0 || one->due_ns < threads[first].due_ns) first = n;
    }
    if (first >= 0) now_ns = now_ns > threads[first].due_ns ? now_ns : threads[first].due_ns;
    return first;
}

static void run(void) {
    memset(page_words, 0, sizeof page_words), memset(has_run, 0, sizeof has_run), memset(found, 0, sizeof found), memset(in_place, 0, sizeof in_place);
    random_state = seed * 0x9E3779B97F4A7C15ULL + 1, now_ns = 1000000, rings = bells = steps = put_calls = 0;
    lock_holder = interpreter_holder = is_dead = 0;
    line = (Bells){.page = (uint64_t)page_words, .doorbell = DOORBELL, .answer = ANSWER, .control = CONTROL};
    total = chance(10) ? 1 + chance(9) : DEPTH + chance(MOST_CALLS - DEPTH);
    kill_at = chance(3) ? 0 : 1 + chance(60 * total);
    uint64_t clients = 1 + chance(CLIENTS), haste = 1 + chance(8);
    for (int n = 0; n < CLIENTS; n++) {
        start(n, run_client);
        if ((uint64_t)n >= clients) threads[n].state = ENDED;
    }
    start(WORKER, run_worker), start(BROKER, run_broker);
    for (;; steps++) {
        int ready[THREADS + 1], count = 0, is_over = 1;
        for (int n = 0; n < CLIENTS; n++) is_over &= threads[n].state == ENDED;
        if (is_over) break;
        if (steps > MOST_STEPS) broken("it does not end");
        if (steps == kill_at && kill_at) {
            drain(&threads[WORKER]); /* what it has stored is stored */
            threads[WORKER].state = ENDED, is_dead = 1;
            wake_one(&threads[BROKER]);
        }
        for (int n = 0; n < THREADS; n++) {
            if (threads[n].state == READY) ready[count++] = n;
            if (threads[n].stored && !chance(haste)) drain_one(&threads[n]);
        }
        int next = count ? ready[chance((uint64_t)count)] : wake_by_time();
        if (next < 0) broken("nothing can go on");
        threads[next].state = READY, current = next;
        swapcontext(&scheduler, &threads[next].context);
    }
    uint64_t lost = 0;
    for (uint64_t call = 1; call <= put_calls; call++) {
        if (found[call] == OPEN) broken("call %llu was forgotten", ULL(call));
        lost += found[call] == IS_LOST;
        static const int way[] = {0, W_RAN, W_DECLINED, W_TAKEN_BACK, W_LOST};
        ways[way[found[call]]]++;
    }
    if (lost > 1) broken("of %llu calls nobody knows whether they ran", ULL(lost));
    if (lost && !is_dead) broken("a call is lost, and the worker lives");
}

int main(int count, char **given) {
    if (count < 3) return fprintf(stderr, "usage: lane FIRST COUNT [BUG]\n"), 2;
    uint64_t first = strtoull(given[1], NULL, 10), many = strtoull(given[2], NULL, 10);
    for (int n = 1; count > 3 && n < BUGS; n++)
        if (!strcmp(given[3], BUG_NAMES[n])) bug = n;
    if (count > 3 && !bug) return fprintf(stderr, "no such bug: %s\n", given[3]), 2;
    for (seed = first; seed < first + many; seed++) run();
    for (size_t n = 0; n < sizeof ways / sizeof *ways; n++) printf("%s %llu\n", WAY_NAMES[n], ULL(ways[n]));
    return 0;
}
