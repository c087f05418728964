#include "client.h"

#include <errno.h>
#include <math.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static double now_s(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

lz_code lz_connect(const lz_connect_options *given, lz_client **made, lz_error *error) {
    lz_connect_options options = {0};
    lzi_clear(error);
    if (!made)
        return lzi_fail(error, LZ_INVALID_ARGUMENT, "Give lz_connect a place for the client");
    *made = NULL;
    if (given && given->struct_size < sizeof given->struct_size)
        return lzi_fail(error, LZ_INVALID_ARGUMENT, "Set struct_size of lz_connect_options to its sizeof; it is %zu",
                        given->struct_size);
    if (given)
        memcpy(&options, given, given->struct_size < sizeof options ? given->struct_size : sizeof options);
    lz_client *client = calloc(1, sizeof *client);
    if (!client)
        return lzi_fail(error, LZ_NO_MEMORY, "Free memory, then try again.\nThere is none for a client");
    client->control = client->wake = client->zmq.fd = -1;
    pthread_mutex_init(&client->lock, NULL);
    pthread_cond_init(&client->turned, NULL);
    pthread_mutex_init(&client->memory.lock, NULL);
    pthread_mutex_init(&client->memory.asking, NULL);
    lz_code code = lzi_lanes_open(client, error);
    if (!code)
        code = lzi_zmq_load(&client->zmq, options.libzmq, error);
    if (!code)
        code = lzi_reach(&options, &client->control, &client->welcome, error);
    if (!code)
        code = lzi_zmq_connect(&client->zmq, client->welcome.endpoint.as.bytes, &client->welcome.identity,
                               (int)(4 * client->welcome.max_in_flight), error);
    if (!code) {
        client->memory.control = client->control;
        client->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        client->frame = malloc(LZI_MAX_FRAME_BYTES);
        if (client->wake < 0 || !client->frame)
            code = lzi_fail(error, LZ_NO_MEMORY, "Free memory and file descriptors, then try again.\n%s",
                            strerror(errno));
    }
    if (code)
        lz_close(client);
    else
        *made = client;
    return code;
}

static void free_route(lzi_known_route *route) {
    free(route->body);
    lzi_told_drop(route->told);
    lzi_lease_free(route->lease);
}

void lz_close(lz_client *client) {
    if (!client)
        return;
    lzi_zmq_close(&client->zmq, !client->is_lost);
    lzi_memory_close(&client->memory);
    if (client->control >= 0)
        close(client->control);
    if (client->wake >= 0)
        close(client->wake);
    for (size_t i = 0; i < client->route_count; i++)
        free_route(&client->routes[i]);
    free(client->routes);
    lzi_lanes_close(client);
    lzi_counters_close(client);
    while (client->lent) {
        lzi_lent *next = client->lent->next;
        free(client->lent);
        client->lent = next;
    }
    free(client->frame);
    lzi_pool_free(&client->welcome.pool);
    pthread_mutex_destroy(&client->memory.lock);
    pthread_mutex_destroy(&client->memory.asking);
    pthread_mutex_destroy(&client->lock);
    pthread_cond_destroy(&client->turned);
    free(client);
}

lz_code lz_alloc(lz_client *client, size_t nbytes, void **data, lz_error *error) {
    lzi_clear(error);
    if (!client || !data)
        return lzi_fail(error, LZ_INVALID_ARGUMENT, "Give lz_alloc a client and a place for the address");
    *data = NULL;
    return lzi_memory_take(&client->memory, nbytes, data, error);
}

lz_code lz_free(lz_client *client, void *data, lz_error *error) {
    lzi_clear(error);
    if (!data)
        return LZ_OK;
    if (!client)
        return lzi_fail(error, LZ_INVALID_ARGUMENT, "Give lz_free the client that the memory is from");
    return lzi_memory_give(&client->memory, data, error);
}

/* --- losing the broker -------------------------------------------------------------------------------------------- */

static void lose(lz_client *client, lz_code code, const char *why) {
    if (!client->is_lost) {
        client->lost_code = code;
        snprintf(client->lost_why, sizeof client->lost_why, "%s", why);
    }
    client->is_lost = true;
    pthread_cond_broadcast(&client->turned);
}

lz_code lzi_say_lost(lz_client *client, lz_error *error) {
    const char *advice = client->lost_code == LZ_BROKER_LOST
                             ? "Start a broker with `lz up`, close this client and connect again."
                             : "Close this client and connect again.";
    return lzi_fail(error, client->lost_code, "%s\n%s", advice, client->lost_why);
}

/* What the broker said before it hung up, if it said anything. */
static void hear_last_word(lz_client *client) {
    lzi_pool pool = {0};
    lzi_value answer;
    lz_code code = LZ_BROKER_LOST;
    char why[sizeof client->lost_why];
    snprintf(why, sizeof why, "The broker (pid %lld) is gone", (long long)client->welcome.broker_pid);
    pthread_mutex_lock(&client->memory.asking);
    if (!lzi_control_receive(client->control, &pool, MSG_DONTWAIT, &answer, NULL, NULL) &&
        lzi_is_text(lzi_get(&answer, "kind"), lzi_refused.kind)) {
        const lzi_value *said = lzi_get(&answer, "error");
        code = lzi_code_of(lzi_get_text(said, "code"));
        snprintf(why, sizeof why, "%s", lzi_get_text(said, "message"));
    }
    pthread_mutex_unlock(&client->memory.asking);
    lzi_pool_free(&pool);
    lose(client, code, why);
}

/* --- frames that come --------------------------------------------------------------------------------------------- */

static void take_released(lz_client *client, uint64_t seq) {
    for (lzi_lent **at = &client->lent; *at; at = &(*at)->next) {
        lzi_lent *lent = *at;
        if (lent->seq != seq)
            continue;
        *at = lent->next;
        for (size_t i = 0; i < lent->count; i++)
            lzi_unpin(&client->memory, lent->blocks[i]);
        free(lent);
        return;
    }
}

static uint8_t *copy_of(const uint8_t *data, size_t nbytes) {
    uint8_t *copy = malloc(nbytes + 1);
    if (copy)
        memcpy(copy, data, nbytes);
    return copy;
}

static void take_decision(lz_client *client, const lzi_header *header, const uint8_t *body, size_t nbytes) {
    lzi_known_route *route = lzi_route_numbered(client, header->route);
    lzi_told *told = route ? lzi_tell(header->aux, body, nbytes) : NULL;
    if (!told) /* forgotten; or a report will not say who served it */
        return;
    lzi_told_drop(route->told);
    route->told = told;
}

static void take_answer(lz_client *client, const lzi_header *header, const uint8_t *body, size_t nbytes) {
    for (lzi_pending **at = &client->pending; *at; at = &(*at)->next) {
        lzi_pending *pending = *at;
        if (pending->seq != header->seq)
            continue;
        *at = pending->next;
        client->pending_count--;
        pending->header = *header;
        pending->body = copy_of(body, nbytes);
        pending->nbytes = pending->body ? nbytes : 0;
        pending->is_done = true;
        pthread_cond_broadcast(&client->turned);
        return;
    }
}

static void drain(lz_client *client) {
    while (!client->is_lost && lzi_zmq_has_input(&client->zmq)) {
        int nbytes = lzi_zmq_receive(&client->zmq, client->frame, LZI_MAX_FRAME_BYTES);
        if (nbytes < 0)
            return;
        lzi_header header;
        const char *wrong = nbytes > LZI_MAX_FRAME_BYTES ? "a frame that is too long"
                                                         : lzi_read_header(client->frame, (size_t)nbytes, &header);
        if (wrong) {
            char why[100];
            snprintf(why, sizeof why, "The broker broke the protocol: %s", wrong);
            lose(client, LZ_BAD_MESSAGE, why);
            return;
        }
        const uint8_t *body = client->frame + LZI_HEADER_BYTES;
        size_t rest = (size_t)nbytes - LZI_HEADER_BYTES;
        client->heard++;
        if (header.kind == LZI_DECISION)
            take_decision(client, &header, body, rest);
        else if (header.kind == LZI_RELEASED)
            take_released(client, header.seq);
        else if (header.kind == LZI_DONE || header.kind == LZI_FAILED || header.kind == LZI_RESPONSE)
            take_answer(client, &header, body, rest);
        else if (header.kind == LZI_LEASE)
            wrong = lzi_lease_take(lzi_route_numbered(client, header.route), header.aux, body, rest);
        else
            wrong = "a frame of an unknown kind";
        if (wrong) {
            char why[sizeof client->lost_why];
            snprintf(why, sizeof why, "The broker broke the protocol: %s", wrong);
            lose(client, LZ_BAD_MESSAGE, why);
        }
    }
}

void lzi_hear_hang_up(lz_client *client) {
    struct pollfd control = {client->control, POLLRDHUP, 0};
    if (client->is_lost || poll(&control, 1, 0) <= 0)
        return;
    drain(client); /* what it still said counts */
    hear_last_word(client);
}

/* --- frames that go ----------------------------------------------------------------------------------------------- */

lz_code lzi_send(lz_client *client, const lzi_bytes *frame, lz_error *error) {
    if (client->is_lost)
        return lzi_say_lost(client, error);
    if (frame->have_failed)
        return lzi_fail(error, LZ_NO_MEMORY, "Free memory, then try again.\nThere is none for a message");
    if (!lzi_zmq_send(&client->zmq, frame->data, frame->nbytes))
        return lzi_fail(error, LZ_BUSY,
                        "Wait for some answers, then make the call again.\nThe broker does not keep up "
                        "with this process's messages");
    if (client->is_reading &&
        lzi_zmq_has_input(&client->zmq)) /* sending has taken the edge that the reader waits for */
        eventfd_write(client->wake, 1);
    return LZ_OK;
}

lz_code lzi_submit(lz_client *client, const lzi_bytes *frame, lzi_pending *pending, lz_error *error) {
    size_t most = (size_t)client->welcome.max_in_flight;
    if (client->pending_count >= most)
        return lzi_fail(error, LZ_BUSY,
                        "Wait for some of the open calls, then make the call again.\n%zu are open, of at "
                        "most %zu",
                        client->pending_count, most);
    lz_code code = lzi_send(client, frame, error);
    if (code)
        return code;
    pending->seq = ++client->last_seq;
    pending->next = client->pending;
    client->pending = pending;
    client->pending_count++;
    return LZ_OK;
}

static void ask_for_a_sign(lz_client *client) {
    lzi_bytes frame = {0};
    lzi_value fields[] = {lzi_text("ping"), {.type = LZI_MAP}};
    lzi_put_header(&frame, (lzi_header){.protocol = LZI_PROTOCOL, .kind = LZI_REQUEST, .seq = ++client->last_seq});
    lzi_encode_message(&frame, &lzi_request, fields);
    lzi_send(client, &frame, NULL); /* a full queue is no sign either */
    lzi_bytes_free(&frame);
}

/* Read for all who wait. A broker that is silent for longer than its own timeout is asked for a sign of life; calls may
 * take longer than that, since others may be before them. */
static void read_until(lz_client *client, const lzi_pending *pending) {
    uint64_t heard = client->heard;
    double patience_s = client->welcome.timeout_s, due_s = now_s() + patience_s;
    bool is_asked = false;
    while (true) {
        drain(client);
        double now = now_s();
        if (pending->is_done || client->is_lost)
            return;
        if (client->heard != heard) {
            heard = client->heard;
            due_s = now + patience_s;
            is_asked = false;
        } else if (now >= due_s && is_asked) {
            lose(client, LZ_BROKER_LOST,
                 "The broker says nothing, although it was asked. If it was stopped, let it go on, "
                 "or end it with lz down --force");
            return;
        } else if (now >= due_s) {
            ask_for_a_sign(client);
            due_s = now + LZI_GRACE_S;
            is_asked = true;
        }
        struct pollfd fds[] = {{client->zmq.fd, POLLIN, 0}, {client->wake, POLLIN, 0}, {client->control, POLLRDHUP, 0}};
        double wait_ms = fmin(ceil(1e3 * (due_s - now)), 1e6);
        pthread_mutex_unlock(&client->lock);
        int found = poll(fds, 3, (int)wait_ms);
        pthread_mutex_lock(&client->lock);
        eventfd_t count;
        if (found > 0 && fds[1].revents)
            eventfd_read(client->wake, &count);
        if (found > 0 && fds[2].revents)
            lzi_hear_hang_up(client);
    }
}

lz_code lzi_wait(lz_client *client, lzi_pending *pending, lz_error *error) {
    while (!pending->is_done && !client->is_lost) {
        if (client->is_reading) {
            pthread_cond_wait(&client->turned, &client->lock);
            continue;
        }
        client->is_reading = true;
        read_until(client, pending);
        client->is_reading = false;
        pthread_cond_broadcast(&client->turned); /* another one reads on */
    }
    if (pending->is_done && pending->body)
        return LZ_OK;
    if (pending->is_done)
        return lzi_fail(error, LZ_NO_MEMORY, "Free memory, then try again.\nThere is none for the broker's answer");
    for (lzi_pending **at = &client->pending; *at; at = &(*at)->next)
        if (*at == pending) {
            *at = pending->next;
            client->pending_count--;
            break;
        }
    return lzi_say_lost(client, error);
}

/* --- routes ------------------------------------------------------------------------------------------------------- */

lzi_known_route *lzi_route_numbered(lz_client *client, uint32_t number) {
    for (size_t i = 0; i < client->route_count; i++)
        if (client->routes[i].number == number)
            return &client->routes[i];
    return NULL;
}

static lz_code forget_oldest(lz_client *client, lz_error *error) {
    lzi_known_route *oldest = NULL;
    for (size_t i = 0; i < client->route_count; i++) {
        lzi_known_route *route = &client->routes[i];
        if (!route->open_calls && (!oldest || route->used_at < oldest->used_at))
            oldest = route;
    }
    if (!oldest)
        return lzi_fail(error, LZ_BUSY,
                        "Wait for some of the open calls, then make the call again.\nEach of %d signatures "
                        "has open ones",
                        LZI_MAX_ROUTES);
    lzi_bytes frame = {0};
    lzi_put_header(&frame, (lzi_header){.protocol = LZI_PROTOCOL, .kind = LZI_FORGET, .route = oldest->number});
    lz_code code = lzi_send(client, &frame, error);
    lzi_bytes_free(&frame);
    if (code)
        return code;
    free_route(oldest);
    *oldest = client->routes[--client->route_count];
    return LZ_OK;
}

static bool search(lz_client *client, const lzi_bytes *body, lzi_known_route **found) {
    for (size_t i = 0; i < client->route_count; i++) {
        lzi_known_route *route = &client->routes[i];
        if (route->nbytes == body->nbytes && !memcmp(route->body, body->data, body->nbytes)) {
            route->used_at = ++client->clock;
            *found = route;
            return true;
        }
    }
    return false;
}

lz_code lzi_ask(lz_client *client, const char *method, const lzi_value *params, lzi_pending *answer, lz_error *error) {
    lzi_value fields[LZI_MAX_FIELDS] = {lzi_text(method), *params};
    lzi_header header = {.protocol = LZI_PROTOCOL, .kind = LZI_REQUEST, .seq = client->last_seq + 1};
    lzi_bytes frame = {0};
    lzi_pool pool = {0};
    lzi_put_header(&frame, header);
    lzi_encode_message(&frame, &lzi_request, fields);
    lz_code code = lzi_submit(client, &frame, answer, error);
    if (!code)
        code = lzi_wait(client, answer, error);
    if (!code && answer->header.kind == LZI_FAILED) {
        const char *wrong = lzi_decode_message(&pool, &lzi_outcome, answer->body, answer->nbytes, fields);
        code = wrong ? lzi_fail(error, LZ_BAD_MESSAGE, "Report this: the broker broke the protocol.\nIt sent %s", wrong)
                     : lzi_fail_as(error, &fields[0]);
        if (!wrong && code == LZ_BAD_MESSAGE) /* that it is, for the broker; for the caller it is an argument */
            code = lzi_fail(error, LZ_INVALID_ARGUMENT, "Correct the call: no backend can serve it as it is.\n%s",
                            lzi_get_text(&fields[0], "message"));
    }
    lzi_bytes_free(&frame);
    lzi_pool_free(&pool);
    return code;
}

/* Have the broker look at a new signature: a route that the op does not allow would end the connection. */
static lz_code check_route(lz_client *client, const lzi_bytes *body, lz_error *error) {
    lzi_value items[] = {
        lzi_text("route"), lzi_data(body->data, (uint32_t)body->nbytes), lzi_text("backends"), {.type = LZI_LIST}};
    lzi_value params = {.type = LZI_MAP, .count = 2, .as.items = items};
    lzi_pending answer = {0};
    lz_code code = lzi_ask(client, "compile", &params, &answer, error);
    free(answer.body);
    return code;
}

lz_code lzi_find_route(lz_client *client, const lzi_bytes *body, lzi_known_route **found, lz_error *error) {
    if (body->have_failed)
        return lzi_fail(error, LZ_NO_MEMORY, "Free memory, then try again.\nThere is none for the call's signature");
    if (search(client, body, found))
        return LZ_OK;
    if (body->nbytes > LZI_MAX_ROUTE_BYTES)
        return lzi_fail(error, LZ_INVALID_ARGUMENT,
                        "Shorten the call's texts: its signature has %zu bytes, of at most %d", body->nbytes,
                        LZI_MAX_ROUTE_BYTES);
    lz_code code = check_route(client, body, error);
    if (code || search(client, body, found)) /* another thread may have had it meanwhile */
        return code;
    code = client->route_count == LZI_MAX_ROUTES ? forget_oldest(client, error) : LZ_OK;
    if (code)
        return code;
    if (!client->routes)
        client->routes = calloc(LZI_MAX_ROUTES, sizeof *client->routes); /* of one size: it never moves */
    uint8_t *copy = client->routes ? copy_of(body->data, body->nbytes) : NULL;
    if (!copy)
        return lzi_fail(error, LZ_NO_MEMORY, "Free memory, then try again.\nThere is none for the call's signature");
    uint32_t number = client->last_route + 1;
    lzi_bytes frame = {0};
    lzi_put_header(&frame, (lzi_header){.protocol = LZI_PROTOCOL, .kind = LZI_ROUTE, .route = number});
    lzi_put(&frame, body->data, body->nbytes);
    code = lzi_send(client, &frame, error);
    lzi_bytes_free(&frame);
    if (code) {
        free(copy);
        return code;
    }
    client->last_route = number;
    *found = &client->routes[client->route_count++];
    **found = (lzi_known_route){.number = number, .used_at = ++client->clock, .body = copy, .nbytes = body->nbytes};
    return LZ_OK;
}
