#include "client.h"

#include <dlfcn.h>
#include <errno.h>
#include <string.h>

/* Of zmq.h, which need not be installed: numbers of libzmq's ABI, the same since 4.2. */
enum { ZMQ_DEALER = 5, ZMQ_DONTWAIT = 1, ZMQ_POLLIN = 1 };
enum {
    ZMQ_ROUTING_ID = 5,
    ZMQ_FD = 14,
    ZMQ_EVENTS = 15,
    ZMQ_LINGER = 17,
    ZMQ_MAXMSGSIZE = 22,
    ZMQ_SNDHWM = 23,
    ZMQ_RCVHWM = 24
};
enum { LINGER_MS = 500 };

lz_code lzi_zmq_load(lzi_zmq *zmq, const char *file, lz_error *error) {
    zmq->fd = -1;
    zmq->library = dlopen(file ? file : "libzmq.so.5", RTLD_NOW | RTLD_LOCAL);
    if (!zmq->library)
        return lzi_fail(error, LZ_CONFIG,
                        "Install libzmq (Debian: apt install libzmq5), or name its file in "
                        "lz_connect_options.libzmq.\nIt could not be loaded: %s",
                        dlerror());
    const struct {
        const char *name;
        void *to;
    } wanted[] = {
        {"zmq_ctx_new", &zmq->ctx_new},
        {"zmq_ctx_term", &zmq->ctx_term},
        {"zmq_socket", &zmq->socket_of},
        {"zmq_close", &zmq->close},
        {"zmq_setsockopt", &zmq->setsockopt},
        {"zmq_getsockopt", &zmq->getsockopt},
        {"zmq_connect", &zmq->connect},
        {"zmq_send", &zmq->send},
        {"zmq_recv", &zmq->recv},
        {"zmq_errno", &zmq->errno_of},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        void *found = dlsym(zmq->library, wanted[i].name);
        if (!found)
            return lzi_fail(error, LZ_CONFIG,
                            "Name a file of libzmq 4.2 or newer in lz_connect_options.libzmq.\n"
                            "The one that was loaded has no %s",
                            wanted[i].name);
        memcpy(wanted[i].to, &found, sizeof found); /* C has no other way from an object to a function */
    }
    return LZ_OK;
}

lz_code lzi_zmq_connect(lzi_zmq *zmq, const char *endpoint, const lzi_value *identity, int queue, lz_error *error) {
    int linger = LINGER_MS;
    int64_t most = LZI_MAX_FRAME_BYTES;
    size_t size = sizeof zmq->fd;
    zmq->context = zmq->ctx_new();
    zmq->socket = zmq->context ? zmq->socket_of(zmq->context, ZMQ_DEALER) : NULL;
    if (!zmq->socket || zmq->setsockopt(zmq->socket, ZMQ_ROUTING_ID, identity->as.bytes, identity->count) ||
        zmq->setsockopt(zmq->socket, ZMQ_SNDHWM, &queue, sizeof queue) ||
        zmq->setsockopt(zmq->socket, ZMQ_RCVHWM, &queue, sizeof queue) ||
        zmq->setsockopt(zmq->socket, ZMQ_MAXMSGSIZE, &most, sizeof most) ||
        zmq->setsockopt(zmq->socket, ZMQ_LINGER, &linger, sizeof linger) || zmq->connect(zmq->socket, endpoint) ||
        zmq->getsockopt(zmq->socket, ZMQ_FD, &zmq->fd, &size))
        return lzi_fail(error, LZ_NOT_CONNECTED,
                        "Allow this process more file descriptors and memory, then connect "
                        "again.\nlibzmq could not connect to %s: %s",
                        endpoint, strerror(zmq->errno_of()));
    return LZ_OK;
}

void lzi_zmq_close(lzi_zmq *zmq, bool may_linger) {
    int linger = 0;
    if (zmq->socket && !may_linger)
        zmq->setsockopt(zmq->socket, ZMQ_LINGER, &linger, sizeof linger);
    if (zmq->socket)
        zmq->close(zmq->socket);
    while (zmq->context && zmq->ctx_term(zmq->context) && zmq->errno_of() == EINTR)
        ;
    if (zmq->library)
        dlclose(zmq->library);
    *zmq = (lzi_zmq){.fd = -1};
}

bool lzi_zmq_has_input(lzi_zmq *zmq) {
    int events = 0;
    size_t size = sizeof events;
    return !zmq->getsockopt(zmq->socket, ZMQ_EVENTS, &events, &size) && events & ZMQ_POLLIN;
}

bool lzi_zmq_send(lzi_zmq *zmq, const void *frame, size_t nbytes) {
    while (zmq->send(zmq->socket, frame, nbytes, ZMQ_DONTWAIT) < 0)
        if (zmq->errno_of() != EINTR)
            return false;
    return true;
}

int lzi_zmq_receive(lzi_zmq *zmq, void *frame, size_t room) {
    int nbytes;
    while ((nbytes = zmq->recv(zmq->socket, frame, room, ZMQ_DONTWAIT)) < 0 && zmq->errno_of() == EINTR)
        ;
    return nbytes;
}
