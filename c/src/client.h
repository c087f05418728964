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
    bool has_joined;
    lzi_value endpoint, identity; /* in the pool */
    lzi_pool pool;
} lzi_welcome_kept;

/* Find the broker, say hello; the control socket, which the caller closes. */
lz_code lzi_reach(const lz_connect_options *options, int *control, lzi_welcome_kept *welcome, lz_error *error);
/* `fd` travels along unless it is -1. */
lz_code lzi_control_send(int control, const lzi_bytes *message, int fd, lz_error *error);
/* The next message, a value in the pool. Descriptors that come with it are closed: none of ours has any. */
lz_code lzi_control_receive(int control, lzi_pool *pool, int flags, lzi_value *value, lz_error *error);
lz_code lzi_lost(lz_error *error);

/* --- memory.c: blocks in arenas */

typedef struct lzi_block lzi_block;
typedef struct lzi_arena lzi_arena;
typedef struct lzi_memory {
    pthread_mutex_t lock; /* of all that is here, and of questions on the control socket */
    lzi_arena **arenas;
    size_t count, room;
    uint32_t last_number;
    int control;
} lzi_memory;

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

/* A route that the broker knows, and its last decision. */
typedef struct lzi_known_route {
    uint32_t number;
    uint32_t open_calls;
    uint64_t used_at;
    uint8_t *body, *decision;
    size_t nbytes, decision_bytes;
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

struct lz_client {
    pthread_mutex_t lock; /* of all that follows but `memory`; never taken by who has that of `memory` */
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

/* Ask the broker; the body of its answer, which the caller frees. */
lz_code lzi_ask(lz_client *client, const char *method, const lzi_value *params, lzi_pending *answer, lz_error *error);

/* --- call.c */

/* As lz_call, without the lock. `prefer`: a kernel that is to serve it, if it may; NULL: none. */
lz_code lzi_call(lz_client *client, const lz_call_spec *given, const char *prefer, lz_report **report, lz_error *error);
bool lzi_overlap(const lzi_ref *one, const lzi_ref *other);

/* --- report.c */

/* A report of an answer; `decision` may be NULL. */
lz_report *lzi_report_of(const lzi_pending *answer, const uint8_t *decision, size_t decision_bytes, size_t copied);

#endif
