/* Express lanes, docs/protocol.md, section 12: calls of a settled route go straight to its worker, past the broker.
 *
 * What both clients do on a lane's page, and how they look and sleep, is compiled of the same headers; what is here is
 * as Lane of client/connection/express.py, whose calls end in the same ways. A route's first calls are the broker's,
 * and so is each call that does not end well here. */
#include "client.h"
#include "message.h"

#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <sys/mman.h>

#include "../../src/layerzero/client/session/_waiting.h"
#include "../../src/layerzero/ipc/shm/_counters.h"

enum { PAGE_BYTES = 53 * 4096, DEFAULT_SPIN_US = 100, MAX_SPIN_US = 10000, SPOILT_MS = 2 };

struct lzi_lease {
    uint32_t lane;
    bool holds, is_counted; /* `is_counted`: whether `row` was looked for */
    uint64_t plan, epoch, row;
    lzi_told *told;
    Watch watch;
};

/* This process's end of a lane to one start of a worker. */
typedef struct lane {
    struct lane *next;
    uint32_t number, users; /* threads in a call on it */
    bool is_opening;        /* a thread asks the broker for it */
    bool is_gone;           /* nothing is put there any more; it goes with the last user */
    char *mapped;           /* NULL: it is not open, nor may be: the broker has heard of it */
    Bells bells;
    uint64_t calls;       /* the last one */
    uint64_t open[DEPTH]; /* calls whose ends have not been read, by place; 0: it is free */
    bool is_left[DEPTH];  /* nobody waits for that one */
} lane;

struct lzi_lanes {
    lane *first;
    Cores cores;
    uint64_t spin_ns;
};

/* --- decisions, shared by a route, its lease and calls on their way ----------------------------------------------- */

lzi_told *lzi_tell(uint32_t number, const uint8_t *bytes, size_t nbytes) {
    lzi_told *told = malloc(sizeof *told + nbytes);
    if (told) {
        *told = (lzi_told){1, number, nbytes};
        memcpy(told->bytes, bytes, nbytes);
    }
    return told;
}

lzi_told *lzi_told_keep(lzi_told *told) {
    if (told)
        told->users++;
    return told;
}

void lzi_told_drop(lzi_told *told) {
    if (told && !--told->users)
        free(told);
}

/* --- leases ------------------------------------------------------------------------------------------------------- */

static bool read_number(const lzi_value *value, uint64_t most, uint64_t *to) {
    if (value->type != LZI_INT || value->as.integer < 0 || (uint64_t)value->as.integer > most)
        return false;
    *to = (uint64_t)value->as.integer;
    return true;
}

const char *lzi_lease_take(lzi_known_route *route, uint32_t decision, const uint8_t *body, size_t nbytes) {
    lzi_value fields[LZI_MAX_FIELDS];
    lzi_pool pool = {0};
    uint64_t number = 0, plan = 0, epoch = 0;
    const char *wrong = lzi_decode_message(&pool, &lzi_lease_message, body, nbytes, fields);
    if (!wrong && !(read_number(&fields[0], UINT32_MAX, &number) && read_number(&fields[1], UINT32_MAX, &plan) &&
                    read_number(&fields[2], INT64_MAX, &epoch)))
        wrong = "a lease of numbers that are none";
    lzi_pool_free(&pool);
    if (wrong || !route || !route->told || route->told->number != decision)
        return wrong; /* forgotten, or its calls have been decided anew */
    if (!route->lease)
        route->lease = calloc(1, sizeof *route->lease);
    lzi_lease *lease = route->lease;
    if (!lease)
        return NULL; /* its calls go on by the broker */
    lzi_told_drop(lease->told);
    lease->told = lzi_told_keep(route->told);
    lease->lane = (uint32_t)number;
    lease->plan = plan;
    lease->epoch = epoch;
    lease->holds = true;
    lease->is_counted = false;
    return NULL;
}

void lzi_lease_free(lzi_lease *lease) {
    if (lease)
        lzi_told_drop(lease->told);
    free(lease);
}

/* --- opening and closing ------------------------------------------------------------------------------------------ */

/* Cores that this process may use: of its mask, and as many whole ones as its control group's quota gives. */
static uint64_t count_cores(void) {
    cpu_set_t mask;
    long long quota, period;
    FILE *limit = fopen("/sys/fs/cgroup/cpu.max", "re");
    uint64_t count = sched_getaffinity(0, sizeof mask, &mask) ? 0 : (uint64_t)CPU_COUNT(&mask);
    if (limit && fscanf(limit, "%lld %lld", &quota, &period) == 2 && quota >= 0 && period > 0 &&
        (uint64_t)(quota / period) < count)
        count = (uint64_t)(quota / period);
    if (limit)
        fclose(limit);
    return count;
}

lz_code lzi_lanes_open(lz_client *client, lz_error *error) {
    static const char BLANKS[] = " \t\n\v\f\r";
    const char *text = getenv("LAYERZERO_SPIN_US"), *end = text ? text + strspn(text, BLANKS) : "";
    uint64_t spin_us = DEFAULT_SPIN_US;
    if (*end) {
        for (spin_us = 0; *end >= '0' && *end <= '9' && spin_us <= MAX_SPIN_US; end++)
            spin_us = 10 * spin_us + (uint64_t)(*end - '0');
        end += strspn(end, BLANKS);
        if (*end || spin_us > MAX_SPIN_US)
            return lzi_fail(error, LZ_CONFIG,
                            "Set LAYERZERO_SPIN_US to whole microseconds from 0, which is never, to %d.\nIt is %.80s",
                            MAX_SPIN_US, text);
    }
    client->lanes = calloc(1, sizeof *client->lanes);
    if (!client->lanes)
        return lzi_fail(error, LZ_NO_MEMORY, "Free memory, then try again.\nThere is none for lanes");
    client->lanes->spin_ns = 1000 * spin_us;
    client->lanes->cores.count = spin_us ? count_cores() : 0;
    return LZ_OK;
}

static void unmap(lane *one) {
    if (one->mapped) {
        munmap(one->mapped, PAGE_BYTES);
        close(one->bells.doorbell);
        close(one->bells.answer);
    }
    pthread_mutex_destroy(&one->bells.lock);
    free(one);
}

void lzi_lanes_close(lz_client *client) {
    while (client->lanes && client->lanes->first) {
        lane *one = client->lanes->first;
        client->lanes->first = one->next;
        unmap(one);
    }
    free(client->lanes);
    client->lanes = NULL;
}

/* Whether this process may have so many more descriptors. */
static bool has_room(int fd, size_t count) {
    lzi_passed spare = {.count = 0};
    while (spare.count < count && (spare.fds[spare.count] = fcntl(fd, F_DUPFD_CLOEXEC, 0)) >= 0)
        spare.count++;
    bool is_there = spare.count == count;
    lzi_drop(&spare);
    return is_there;
}

/* Show the broker a lane's page, and take its bells; without the lock. Without memory or descriptors, or without its
 * worker, there is no lane: `mapped` stays NULL. Whether the broker might have it open all the same. */
static bool show(lz_client *client, lane *made) {
    lzi_value fields[] = {lzi_int(made->number), lzi_text("")}, answer[LZI_MAX_FIELDS];
    lzi_passed bells = {.count = 0};
    int fd;
    char *mapped;
    if (lzi_share("lz-lane", PAGE_BYTES, &fd, &mapped, NULL))
        return false;
    lzi_shown shown = {&lzi_add_lane, fields, fd, &lzi_lane_added, true};
    bool may_ask = has_room(fd, LZI_MAX_PASSED);
    lz_code code = may_ask ? lzi_show(&client->memory, &shown, answer, &bells, NULL) : LZ_NO_MEMORY;
    close(fd);
    if (code || !answer[1].as.is_true || bells.count != LZI_MAX_PASSED) {
        lzi_drop(&bells);
        munmap(mapped, PAGE_BYTES);
        return may_ask && (code || answer[1].as.is_true);
    }
    made->mapped = mapped;
    made->bells.page = (uint64_t)(uintptr_t)mapped;
    made->bells.doorbell = bells.fds[0];
    made->bells.answer = bells.fds[1];
    made->bells.control = client->control;
    return true;
}

static lane *find(lz_client *client, uint32_t number) {
    lane *one = client->lanes->first;
    while (one && one->number != number)
        one = one->next;
    return one;
}

static void take_out(lz_client *client, const lane *gone) {
    lane **at = &client->lanes->first;
    while (*at != gone)
        at = &(*at)->next;
    *at = gone->next;
}

/* Those whose workers are gone. Others may be on them, and find that out themselves. */
static void leave_ended(lz_client *client) {
    for (lane *one = client->lanes->first, *next; one; one = next) {
        next = one->next;
        if (one->is_opening || !one->mapped || !load64(one->bells.page + IS_ENDED))
            continue;
        take_out(client, one);
        for (size_t i = 0; i < client->route_count; i++)
            if (client->routes[i].lease && client->routes[i].lease->lane == one->number)
                client->routes[i].lease->holds = false;
        one->is_gone = true;
        __atomic_store_n(&one->bells.is_closed, 1, __ATOMIC_RELEASE);
        wake_others(&one->bells);
        if (!one->users)
            unmap(one);
    }
}

/* Lets go of the lock meanwhile. A record stays where the broker may have the lane: it must not be told of it twice.
 * Whether there is one. */
static bool open_lane(lz_client *client, uint32_t number) {
    lane *made = calloc(1, sizeof *made);
    leave_ended(client);
    if (!made)
        return false;
    made->number = number;
    made->is_opening = true;
    pthread_mutex_init(&made->bells.lock, NULL);
    made->next = client->lanes->first;
    client->lanes->first = made;
    pthread_mutex_unlock(&client->lock);
    bool is_known = show(client, made);
    pthread_mutex_lock(&client->lock);
    made->is_opening = false;
    if (!is_known) {
        take_out(client, made);
        unmap(made);
    }
    return is_known;
}

/* --- a call ------------------------------------------------------------------------------------------------------- */

typedef struct waiting {
    lz_client *client;
    lane *on;
    uint64_t call, due, timeout_ns;
    uint32_t route;
    bool is_behind; /* others were before it when it was put */
    End end;
} waiting;

static uint64_t page_of(const waiting *now) {
    return now->on->bells.page;
}

/* 1: the call has ended, and its place is free; 0: it has not; -1: its end makes no sense. */
static int read_end(waiting *now, lzi_passage *passage) {
    int has_ended = get_end(page_of(now), now->call, &now->end);
    if (has_ended <= 0)
        return has_ended;
    const char *said = (const char *)place_of(page_of(now), now->call) + SAID_AT;
    passage->answer.body = now->end.nbytes ? malloc(now->end.nbytes) : NULL;
    passage->answer.nbytes = passage->answer.body ? now->end.nbytes : 0;
    if (passage->answer.body)
        memcpy(passage->answer.body, said, now->end.nbytes);
    now->on->open[(now->call - 1) % DEPTH] = 0;
    return 1;
}

/* False: there is no room. The ring is the caller's to make, without the lock. */
static bool put(waiting *now, uint64_t plan, const lzi_bytes *refs) {
    lane *on = now->on;
    uint64_t call = on->calls + 1, *place = &on->open[(call - 1) % DEPTH];
    End end;
    if (*place && !(on->is_left[(call - 1) % DEPTH] && get_end(page_of(now), *place, &end) > 0))
        return false;
    now->call = on->calls = *place = call;
    on->is_left[(call - 1) % DEPTH] = false;
    now->is_behind = load64(page_of(now) + DONE) + 1 < call;
    now->due = clock_ns() + now->timeout_ns;
    put_call(page_of(now), call, plan, (const char *)refs->data, refs->nbytes);
    owe(&on->bells, 1);
    return true;
}

static void unlock_and_pay(waiting *now, uint64_t rings) {
    pthread_mutex_unlock(&now->client->lock);
    if (rings)
        pay(&now->on->bells, rings);
}

/* Whether the worker has not got the call, nor will get it: as Line_withdraw of client/session/_line.h. */
static bool withdraw(waiting *now) {
    Bells *bells = &now->on->bells;
    uint64_t start = clock_ns(), taken;
    int whose = UNKNOWN_YET;
    while (true) {
        whose = take_back(bells, now->call, now->on->calls, &taken);
        if (whose == UNKNOWN_YET && clock_ns() - start > PATIENCE_NS)
            whose = CLAIMED;     /* somebody made the doorbell one that blocks */
        if (whose == TAKEN_BACK) /* its place is free when the worker has declined it */
            now->on->is_left[(now->call - 1) % DEPTH] = true;
        if (!taken && whose != UNKNOWN_YET)
            break;
        unlock_and_pay(now, taken);
        if (whose == UNKNOWN_YET)
            nanosleep(&(struct timespec){0, 20000}, NULL);
        pthread_mutex_lock(&now->client->lock);
        if (whose != UNKNOWN_YET)
            break;
    }
    return whose == TAKEN_BACK;
}

/* Whether a call whose time is up, and that was behind others, has time of its own from now on: the worker has begun
 * with it, nobody knows when. */
static bool gives_time(waiting *now) {
    if (!now->is_behind)
        return false;
    now->is_behind = false;
    now->due = clock_ns() + now->timeout_ns;
    return true;
}

/* Whether the broker has hung up, or is as good as gone: then nobody says what becomes of the call. */
static bool is_lost(waiting *now, int within_ms) {
    struct pollfd hang_up = {now->client->control, POLLRDHUP, 0};
    if (within_ms && !now->client->is_lost) {
        pthread_mutex_unlock(&now->client->lock);
        poll(&hang_up, 1, within_ms);
        pthread_mutex_lock(&now->client->lock);
    }
    lzi_hear_hang_up(now->client);
    return now->client->is_lost;
}

static void report_overdue(waiting *now) {
    lzi_bytes frame = {0};
    lzi_header header = {.protocol = LZI_PROTOCOL, .kind = LZI_OVERDUE, .route = now->route, .seq = now->call};
    header.aux = now->on->number;
    header.time = now->timeout_ns / 1000;
    lzi_put_header(&frame, header);
    lzi_send(now->client, &frame, NULL); /* a full queue: it is said again */
    lzi_bytes_free(&frame);
}

/* Raises nothing: a broker that says nothing, although it is asked, is lost then. */
static void check_alive(waiting *now) {
    lzi_value params = {.type = LZI_MAP};
    lzi_pending answer = {0};
    lzi_ask(now->client, "ping", &params, &answer, NULL);
    free(answer.body);
}

/* What became of a call, once somebody must look: as Lane._wait of client/connection/express.py. */
static lzi_way settle(waiting *now, lzi_passage *passage) {
    bool is_reported = false;
    while (true) {
        bool is_worker_gone = load64(page_of(now) + IS_ENDED); /* first: its last end may come between two looks */
        int has_ended = read_end(now, passage);
        bool is_spoilt = has_ended < 0;
        if (has_ended > 0)
            return now->end.status == OK ? LZI_RAN : now->end.status == DECLINED ? LZI_BY_BROKER : LZI_RAISED;
        if (is_worker_gone)
            return withdraw(now) ? LZI_NOT_TAKEN : LZI_AFTER;
        if (is_lost(now, is_reported ? SPOILT_MS : 0))
            return LZI_GONE;
        if (clock_ns() >= now->due || (is_spoilt && !is_reported)) {
            if (!is_spoilt && withdraw(now))
                return LZI_BY_BROKER; /* other calls come first: at the broker that is no fault */
            if (!is_spoilt && !is_reported && gives_time(now))
                continue;
            if (is_reported)
                check_alive(now);
            report_overdue(now);
            now->due = clock_ns() + (uint64_t)(1e9 * LZI_GRACE_S);
            is_reported = true;
        }
        pthread_mutex_unlock(&now->client->lock);
        wait_for(&now->on->bells, now->call, 0, now->due);
        pthread_mutex_lock(&now->client->lock);
    }
}

/* The lock is let go of where the page of counters is new. */
static void look_for_row(lz_client *client, lzi_lease *lease, const char *op) {
    lzi_told *told = lzi_told_keep(lease->told);
    uint64_t row = lzi_told_row(client, op, told, "express");
    if (lease->told == told) {
        lease->row = row;
        lease->is_counted = !client->is_adding_counters;
    }
    lzi_told_drop(told);
}

/* The lane that a call may take now. The lock is let go of where something is to be opened first; who comes meanwhile
 * goes by the broker. */
static lane *lane_of(lz_client *client, lzi_lease *lease, const char *op) {
    while (lease->holds && !client->is_lost) {
        uint32_t number = lease->lane;
        lane *on = find(client, number);
        if (on && on->is_opening)
            return NULL;
        if (on && on->mapped && load64(on->bells.page + IS_ENDED)) {
            leave_ended(client);
            lease->holds = false;
        } else if (on && (!on->mapped || load64(on->bells.page + EPOCH) != lease->epoch)) {
            lease->holds = false;
        } else if (on && lease->is_counted) {
            return on;
        } else if (client->is_adding_counters) {
            return NULL;
        } else if (on) {
            look_for_row(client, lease, op);
        } else if (!open_lane(client, number)) {
            lease->holds &= lease->lane != number;
        }
    }
    return NULL;
}

lzi_way lzi_lane_run(lz_client *client, lzi_known_route *route, lzi_passage *passage) {
    lzi_lease *lease = route->lease;
    uint32_t number = route->number;
    if (!lease || passage->refs->nbytes > MAX_CALL_BYTES)
        return LZI_BY_BROKER;
    lane *on = lane_of(client, lease, passage->op);
    if (!on)
        return LZI_BY_BROKER;
    double timeout_s = passage->timeout_us ? 1e-6 * (double)passage->timeout_us : client->welcome.timeout_s;
    waiting now = {.client = client, .on = on, .route = number, .timeout_ns = (uint64_t)(1e9 * timeout_s)};
    if (passage->refs->have_failed || !put(&now, lease->plan, passage->refs))
        return LZI_BY_BROKER;
    passage->told = lzi_told_keep(lease->told); /* it may be another when this call has ended */
    uint64_t row = lease->row, seen_ns;
    uint64_t spin_ns = wanted_ns(&lease->watch, &client->lanes->cores, client->lanes->spin_ns);
    on->users++;
    unlock_and_pay(&now, 1);
    seen_ns = wait_for(&on->bells, now.call, spin_ns, now.due);
    pthread_mutex_lock(&client->lock);
    if (spin_ns && seen_ns != NOT_WATCHED)
        note_watch(&lease->watch, seen_ns);
    lzi_way way = settle(&now, passage);
    passage->answer.header = (lzi_header){.kind = LZI_DONE, .attempt = 1, .time = now.end.kernel_ns};
    passage->lane = on->number;
    passage->call = (uint32_t)now.call;
    if (way == LZI_RAN)
        count_calls(row, clock_ns() - passage->start_ns, passage->copied, 1);
    else if (way == LZI_RAISED || way == LZI_NOT_TAKEN)
        lzi_note_fallback(row, way == LZI_RAISED ? &passage->answer : NULL);
    if (!on->is_gone && load64(on->bells.page + IS_ENDED))
        leave_ended(client);
    if (!--on->users && on->is_gone)
        unmap(on);
    return way;
}
