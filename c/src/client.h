/* What the parts of a client share. */
#ifndef LZI_CLIENT_H
#define LZI_CLIENT_H

#include "../layerzero.h"
#include "message.h"

#include <pthread.h>

/* --- error.c */

/* Write an error, whose first line is `what`; returns its code. */
lz_code lzi_fail(lz_error *error, lz_code code, const char *what, ...) __attribute__((format(printf, 3, 4)));
/* What a map of docs/protocol.md, section 9, says: its code's advice, then its message. */
lz_code lzi_fail_as(lz_error *error, const lzi_value *said);
lz_code lzi_code_of(const char *name);
/* Another line behind the message. */
void lzi_add_line(lz_error *error, const char *what, ...) __attribute__((format(printf, 2, 3)));
void lzi_clear(lz_error *error);

/* --- zmq.c: what is needed of libzmq, which is loaded when a client connects */

typedef struct lzi_zmq {
    void *library, *context, *socket;
    int fd; /* readable when the socket's state may have changed; edge-triggered */
    void *(*ctx_new)(void);
    int (*ctx_term)(void *);
    void *(*socket_of)(void *, int);
    int (*close)(void *);
    int (*setsockopt)(void *, int, const void *, size_t);
    int (*getsockopt)(void *, int, void *, size_t *);
    int (*connect)(void *, const char *);
    int (*send)(void *, const void *, size_t, int);
    int (*recv)(void *, void *, size_t, int);
    int (*errno_of)(void);
} lzi_zmq;

lz_code lzi_zmq_load(lzi_zmq *zmq, const char *file, lz_error *error);
lz_code lzi_zmq_connect(lzi_zmq *zmq, const char *endpoint, const lzi_value *identity, int queue, lz_error *error);
void lzi_zmq_close(lzi_zmq *zmq, bool may_linger);
bool lzi_zmq_has_input(lzi_zmq *zmq);
/* False where the queue is full. */
bool lzi_zmq_send(lzi_zmq *zmq, const void *frame, size_t nbytes);
/* Bytes of the next frame, which may be more than there is room for; -1: none is here. */
int lzi_zmq_receive(lzi_zmq *zmq, void *frame, size_t room);

/* --- control.c: the control socket */

typedef struct lzi_welcome_kept {
    int64_t broker_pid, max_in_flight;
    double timeout_s;
    bool has_joined, counts;      /* `counts`: it takes a page of counters, and was shown none */
    lzi_value endpoint, identity; /* in the pool */
    lzi_pool pool;
} lzi_welcome_kept;

/* Find the broker, say hello; the control socket, which the caller closes. */
lz_code lzi_reach(const lz_connect_options *options, int *control, lzi_welcome_kept *welcome, lz_error *error);
/* `fd` travels along unless it is -1. */
lz_code lzi_control_send(int control, const lzi_bytes *message, int fd, lz_error *error);

/* Descriptors that came with a message. */
enum { LZI_MAX_PASSED = 2 };
typedef struct lzi_passed {
    int fds[LZI_MAX_PASSED];
    size_t count;
} lzi_passed;

void lzi_drop(lzi_passed *passed);
/* The next message, a value in the pool. Descriptors that come with it are added to `passed`, or closed. */
lz_code lzi_control_receive(int control, lzi_pool *pool, int flags, lzi_value *value, lzi_passed *passed,
                            lz_error *error);

/* A message with a descriptor that the broker answers; `is_numbered`: with the first field of both. */
typedef struct lzi_shown {
    const lzi_message *message;
    const lzi_value *fields;
    int fd;
    const lzi_message *answer;
    bool is_numbered;
} lzi_shown;

lz_code lzi_lost(lz_error *error);

/* --- memory.c: blocks in arenas */

typedef struct lzi_block lzi_block;
typedef struct lzi_arena lzi_arena;
typedef struct lzi_memory {
    pthread_mutex_t lock;   /* of all that is here */
    pthread_mutex_t asking; /* of who waits for an answer on the control socket; nothing else is locked under it */
    lzi_arena **arenas;
    size_t count, room;
    uint32_t last_number;
    int control;
} lzi_memory;

/* Send it and wait for the answer: its fields, of which texts and bytes are gone, and the descriptors with it. It may
 * take seconds: never with the client's lock. */
lz_code lzi_show(lzi_memory *memory, const lzi_shown *shown, lzi_value answer[LZI_MAX_FIELDS], lzi_passed *passed,
                 lz_error *error);
/* A sealed file of so many bytes, all there, and mapped. */
lz_code lzi_share(const char *name, uint64_t nbytes, int *fd, char **mapped, lz_error *error);
lz_code lzi_memory_take(lzi_memory *memory, size_t nbytes, void **data, lz_error *error);
/* Look up the block that has these bytes, and keep it until lzi_unpin; NULL: there is none. */
lzi_block *lzi_pin(lzi_memory *memory, const void *data, uint64_t nbytes, lzi_ref *ref);
void lzi_unpin(lzi_memory *memory, lzi_block *block);
lz_code lzi_memory_give(lzi_memory *memory, void *data, lz_error *error);
void lzi_memory_close(lzi_memory *memory);

/* --- link.c: frames */

typedef struct lzi_pending lzi_pending;
struct lzi_pending {
    uint64_t seq;
    bool is_done;
    lzi_header header;
    uint8_t *body; /* whoever waits frees it */
    size_t nbytes;
    lzi_pending *next;
};

/* What the broker has said of who serves a route: a `decision`. With the client's lock. */
typedef struct lzi_told {
    uint32_t users, number;
    size_t nbytes;
    uint8_t bytes[];
} lzi_told;

lzi_told *lzi_tell(uint32_t number, const uint8_t *bytes, size_t nbytes);
lzi_told *lzi_told_keep(lzi_told *told); /* NULL: nothing */
void lzi_told_drop(lzi_told *told);

typedef struct lzi_lease lzi_lease;
typedef struct lzi_lanes lzi_lanes;

/* A route that the broker knows, its last decision, and its lease. */
typedef struct lzi_known_route {
    uint32_t number;
    uint32_t open_calls;
    uint64_t used_at;
    uint8_t *body;
    size_t nbytes;
    lzi_told *told;
    lzi_lease *lease;
} lzi_known_route;

/* Memory that a worker out of reach may write to, until RELEASED. */
typedef struct lzi_lent lzi_lent;
struct lzi_lent {
    lzi_lent *next;
    uint64_t seq;
    size_t count;
    lzi_block *blocks[];
};

#ifndef LZI_MAX_ROUTES
#define LZI_MAX_ROUTES 512 /* that a client keeps; tests have fewer */
#endif
#ifndef LZI_GRACE_S
#define LZI_GRACE_S 10.0 /* for a broker that was asked whether it is there; tests give less */
#endif

struct lz_client {
    pthread_mutex_t lock; /* of all that follows but `memory`; never taken by who has a lock of `memory` */
    pthread_cond_t turned;
    bool is_reading, is_lost;
    lz_code lost_code;
    char lost_why[200];
    int control, wake;
    lzi_zmq zmq;
    lzi_welcome_kept welcome;
    uint64_t last_seq, heard, clock;
    size_t pending_count;
    lzi_pending *pending;
    lzi_lent *lent;
    lzi_known_route *routes;
    size_t route_count, route_room;
    uint32_t last_route;
    uint8_t *frame; /* room for one that comes */
    lzi_lanes *lanes;
    char *counters;         /* the page; NULL: there is none */
    bool is_adding_counters; /* a thread shows the broker the page */
    lzi_memory memory;
};

/* The following are called with the lock. */
/* Send a frame; false, with the error, when it was not sent. */
lz_code lzi_send(lz_client *client, const lzi_bytes *frame, lz_error *error);
/* Send a frame that is answered; its sequence number is client->last_seq + 1. */
lz_code lzi_submit(lz_client *client, const lzi_bytes *frame, lzi_pending *pending, lz_error *error);
/* Returns when it is done, or the broker is lost. */
lz_code lzi_wait(lz_client *client, lzi_pending *pending, lz_error *error);
/* The route with this body, which is sent if it is new. */
lz_code lzi_find_route(lz_client *client, const lzi_bytes *body, lzi_known_route **route, lz_error *error);
lzi_known_route *lzi_route_numbered(lz_client *client, uint32_t number);

/* That the client is lost. */
lz_code lzi_say_lost(lz_client *client, lz_error *error);
/* Whether the broker has hung up is looked at now. */
void lzi_hear_hang_up(lz_client *client);
/* Ask the broker; the body of its answer, which the caller frees. */
lz_code lzi_ask(lz_client *client, const char *method, const lzi_value *params, lzi_pending *answer, lz_error *error);

/* --- lane.c: express lanes, docs/protocol.md, section 12. With the lock */

/* How a call goes that might go by a lane. */
typedef enum lzi_way {
    LZI_BY_BROKER, /* it did not run */
    LZI_RAN,
    LZI_RAISED,    /* the broker takes it, and a report has this attempt: `answer` has the error */
    LZI_NOT_TAKEN, /* likewise: its worker was gone before it took the call */
    LZI_AFTER,     /* its worker died: the broker is told on which lane, and in which call of that */
    LZI_GONE       /* the client is lost; a worker may still write to the call's memory */
} lzi_way;

typedef struct lzi_passage {
    const char *op;
    const lzi_bytes *refs;
    uint64_t timeout_us, start_ns;
    size_t copied;
    /* What became of it: */
    uint32_t lane, call;
    lzi_pending answer; /* as of a DONE; whoever has it frees the body */
    lzi_told *told;     /* likewise: lzi_told_drop */
} lzi_passage;

lz_code lzi_lanes_open(lz_client *client, lz_error *error);
void lzi_lanes_close(lz_client *client);
/* The broker says that a route's calls may go straight to the worker. NULL, or what is wrong with that. */
const char *lzi_lease_take(lzi_known_route *route, uint32_t decision, const uint8_t *body, size_t nbytes);
void lzi_lease_free(lzi_lease *lease);
/* Opens the route's lane and waits for the call's end without the lock; `route` may have moved then. */
lzi_way lzi_lane_run(lz_client *client, lzi_known_route *route, lzi_passage *passage);

/* --- counters.c: docs/protocol.md, section 18. With the lock */

/* Where calls that this kernel serves on this path are counted; 0: nowhere. The first time the broker is shown a page,
 * without the lock; who comes meanwhile gets 0. */
uint64_t lzi_counter_row(lz_client *client, const char *op, const char *kernel_id, const char *path);
/* Likewise, of a decision, which the caller keeps. */
uint64_t lzi_told_row(lz_client *client, const char *op, const lzi_told *told, const char *path);
void lzi_note_copied(uint64_t row, uint64_t nbytes);
/* An attempt failed that the broker has not seen. `said`: an error; NULL: its worker was gone. */
void lzi_note_fallback(uint64_t row, const lzi_pending *said);
/* A call ended in an error that the broker has not counted. */
void lzi_note_error(uint64_t row, const char *code);
void lzi_counters_close(lz_client *client);

/* --- call.c */

/* As lz_call, without the lock. `prefer`: a kernel that is to serve it, if it may; NULL: none. */
lz_code lzi_call(lz_client *client, const lz_call_spec *given, const char *prefer, lz_report **report, lz_error *error);
bool lzi_overlap(const lzi_ref *one, const lzi_ref *other);

/* --- report.c */

/* What a report is made of. */
typedef struct lzi_ending {
    const lzi_pending *answer;
    const char *path;
    const lzi_told *told; /* NULL: nothing was decided */
    size_t copied;
    const lzi_told *tried; /* whom an attempt on a lane was of, before the broker had the call; NULL: there was none */
    const lzi_bytes *why;  /* the error of that */
} lzi_ending;

lz_report *lzi_report_of(const lzi_ending *ending);

#endif
