/* Calls of express lanes, served in C: what workers/lanes.py and workers/loop.py do, for calls that are ready to be run and say nothing
   but that they have ended. All others are left to the Python: `serve` runs a call, `finish` tells a client of an error or a value.

   A worker's environment may have an older Python than its client's: the stable ABI of 3.10, and no buffers. What a client wrote is
   read once, and copied before it is used. What is called here may close lanes: `is_open` tells, and `changes` counts. */

#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#include <errno.h>
#include <stddef.h>
#include <string.h>
#include <structmember.h>
#include <sys/epoll.h>

#include "../ipc/shm/_lane.h"

enum { IDLE, MAPPED, EXECUTING, WRITTEN };                  /* ipc/vocabulary/worker_codes.py */
enum { SOCKETS = 2, MAX_TAKES = 256, MOST = 16 };           /* the broker's; tries to take a ring that must come at once; news at a time */
enum { COUNT_AT = 24, CALLS_AT = 1024, MOST_RECENT = 64, RECENT_BYTES = 48, TAIL_BYTES = 16, RUNNING = 0, HAS_ENDED = 1, HAS_RAISED = 2 }; /* ipc/shm/recent_calls.py */
static const uint64_t TURN_NS = 20000; /* so long short calls of one lane may go on before others are asked for */

#define FIELD(name) PyObject *name;
#define LINE(X) X(page) X(ready) X(lane) X(end)
#define SERVER(X) X(lines) X(serve) X(finish) X(mute) X(write) X(latest)

/* A lane. `ready`: its calls that may be run at once, by plan and references; `end`: None, or what ends its calls where faults are
   wanted. */
typedef struct {
    PyObject_HEAD
    union {
        struct { LINE(FIELD) };
        PyObject *of[sizeof(struct { LINE(FIELD) }) / sizeof(PyObject *)];
    } its;
    unsigned long long mark, last_call; /* the upper half of what the control page says of its calls; that was claimed */
    uint64_t address;
    int doorbell, answer;
    char is_open;
} Line;

/* `lines`: a list. `write`: None, or what writes the control page where faults are wanted. `latest`: had a call just now. */
typedef struct {
    PyObject_HEAD
    union {
        struct { SERVER(FIELD) };
        PyObject *of[sizeof(struct { SERVER(FIELD) }) / sizeof(PyObject *)];
    } its;
    uint64_t page, spin_ns, now_ns, changes;
    Watch watch;
    Cores cores;
    int sockets[SOCKETS], epoll;
    char is_wanted; /* by the loop */
} Server;
enum { LINE_FIELDS = sizeof(((Line *)0)->its.of) / sizeof(PyObject *), SERVER_FIELDS = sizeof(((Server *)0)->its.of) / sizeof(PyObject *) };

static PyTypeObject *line_type;

static PyObject *make(PyTypeObject *type) { return ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0); }

static void keep(PyObject **at, PyObject *value) {
    PyObject *before = *at;
    Py_XINCREF(value);
    *at = value;
    Py_XDECREF(before);
}

#define LIFE(Type, FIELDS, FREE)                                            \
    static int Type##_traverse(Type *self, visitproc visit, void *arg) {    \
        Py_VISIT(Py_TYPE((PyObject *)self));                                 \
        for (int n = 0; n < FIELDS; n++) Py_VISIT(self->its.of[n]);          \
        return 0;                                                            \
    }                                                                        \
    static int Type##_clear(Type *self) {                                    \
        for (int n = 0; n < FIELDS; n++) Py_CLEAR(self->its.of[n]);          \
        return 0;                                                            \
    }                                                                        \
    static void Type##_dealloc(Type *self) {                                 \
        PyTypeObject *type = Py_TYPE((PyObject *)self);                      \
        PyObject_GC_UnTrack(self);                                           \
        Type##_clear(self);                                                  \
        FREE;                                                                \
        ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);                  \
        Py_DECREF(type);                                                     \
    }
LIFE(Line, LINE_FIELDS, (void)0)
LIFE(Server, SERVER_FIELDS, self->epoll > 0 ? close(self->epoll) : 0)

static PyObject *Line_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *given[LINE_FIELDS];
    unsigned long long address, mark;
    int doorbell, answer;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "OOOOKKii", &given[0], &given[1], &given[2], &given[3], &address, &mark, &doorbell, &answer)) return NULL;
    Line *self = (Line *)make(type);
    if (!self) return NULL;
    for (int n = 0; n < LINE_FIELDS; n++) keep(&self->its.of[n], given[n]);
    store64(address + WAKES, 1);
    self->address = address, self->mark = mark, self->doorbell = doorbell, self->answer = answer;
    return (PyObject *)self;
}

static int listen_to(Server *self, int fd, uint64_t as) {
    struct epoll_event wanted = {EPOLLIN, {.u64 = as}};
    if (epoll_ctl(self->epoll, EPOLL_CTL_ADD, fd, &wanted) == 0) return 0;
    PyErr_SetFromErrno(PyExc_OSError);
    return -1;
}

static PyObject *Server_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *serve, *finish, *mute, *write;
    unsigned long long page, spin_ns, cores;
    int sockets[SOCKETS];
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "OOOOKKKii", &serve, &finish, &mute, &write, &page, &spin_ns, &cores, &sockets[0], &sockets[1])) return NULL;
    Server *self = (Server *)make(type);
    if (!self) return NULL;
    self->its.lines = PyList_New(0);
    keep(&self->its.serve, serve);
    keep(&self->its.finish, finish);
    keep(&self->its.mute, mute);
    keep(&self->its.write, write);
    self->page = page, self->spin_ns = spin_ns, self->cores.count = cores;
    self->epoll = epoll_create1(EPOLL_CLOEXEC);
    int status = self->its.lines ? 0 : -1;
    for (int n = 0; n < SOCKETS && status == 0; n++) self->sockets[n] = sockets[n], status = listen_to(self, sockets[n], (uint64_t)n);
    if (status < 0) Py_CLEAR(self);
    return (PyObject *)self;
}

/* --- one call */

/* What the control page says: two words, of which the broker reads. */
static int write_page(Server *self, uint64_t dispatch, uint64_t phase) {
    if (self->its.write == Py_None) {
        store64(self->page, dispatch);
        store64(self->page + 8, phase);
        return 0;
    }
    PyObject *done = PyObject_CallFunction(self->its.write, "KK", (unsigned long long)dispatch, (unsigned long long)phase);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* Where the call is noted that begins now: the broker reads the newest ones when this process has died. */
static uint64_t note_begin(uint64_t page, uint64_t plan, uint64_t begun_ns, uint64_t refs, uint64_t nbytes) {
    uint64_t count = load64(page + COUNT_AT), at = page + CALLS_AT + RECENT_BYTES * (count % MOST_RECENT);
    uint64_t tail = nbytes < TAIL_BYTES ? nbytes : TAIL_BYTES;
    store64(at, plan);
    store64(at + 8, begun_ns);
    store64(at + 16, 0);
    store64(at + 24, RUNNING | nbytes << 32);
    memcpy((char *)at + 32, (const char *)refs + nbytes - tail, tail);
    store64(page + COUNT_AT, count + 1);
    return at;
}

static void note_end(uint64_t at, uint64_t took_ns, uint64_t how) {
    store64(at + 16, took_ns);
    store64(at + 24, (load64(at + 24) & ~(uint64_t)0xFFFFFFFF) | how);
}

static PyObject *Line_tell(Line *self, PyObject *call) {
    uint64_t number = PyLong_AsUnsignedLongLong(call);
    if (PyErr_Occurred()) return NULL;
    tell(self->address, self->answer, number);
    Py_RETURN_NONE;
}

static int end_call(Line *line, uint64_t call, uint64_t plan, uint64_t kernel_ns) {
    if (line->its.end != Py_None) {
        PyObject *done = PyObject_CallFunction(line->its.end, "KiKK", (unsigned long long)call, OK, (unsigned long long)plan, (unsigned long long)kernel_ns);
        Py_XDECREF(done);
        return done ? 0 : -1;
    }
    put_end(line->address, call, OK, plan, kernel_ns);
    tell(line->address, line->answer, call);
    return 0;
}

/* `outcome`: what the kernel returned or raised; takes the reference. */
static int finish(Server *self, Line *line, uint64_t call, uint64_t plan, uint64_t kernel_ns, PyObject *outcome) {
    PyObject *done = PyObject_CallFunction(self->its.finish, "OKKKO", line->its.lane, (unsigned long long)call, (unsigned long long)plan,
                                           (unsigned long long)kernel_ns, outcome);
    Py_DECREF(outcome);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* The exception that is set, where it is the call's and not the worker's. */
static PyObject *take_exception(void) {
    PyObject *type, *value, *traceback;
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return NULL;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return value;
}

static int run(Server *self, Line *line, uint64_t call, uint64_t plan, PyObject *bound, uint64_t nbytes) {
    uint64_t dispatch = line->mark | (call & 0xFFFFFFFF), begun_ns, kernel_ns = 0, noted = 0;
    PyObject *result = NULL;
    int status = self->its.write == Py_None ? 0 : write_page(self, dispatch, MAPPED);
    if (status == 0) status = write_page(self, dispatch, EXECUTING);
    if (status == 0) {
        begun_ns = clock_ns();
        noted = note_begin(self->page, plan, begun_ns, place_of(line->address, call) + REFS_AT, nbytes);
        result = PyObject_CallNoArgs(bound);
        self->now_ns = clock_ns(), kernel_ns = self->now_ns - begun_ns;
    }
    if (result && write_page(self, dispatch, WRITTEN) < 0) Py_CLEAR(result);
    uint64_t how = result ? HAS_ENDED : HAS_RAISED;
    if (!result && !(result = take_exception())) return -1;
    if (noted) note_end(noted, kernel_ns, how);
    if (line->is_open && result != Py_None) return finish(self, line, call, plan, kernel_ns, result);
    Py_DECREF(result);
    status = line->is_open ? end_call(line, call, plan, kernel_ns) : 0; /* else nobody is there to be told */
    return status < 0 ? -1 : write_page(self, 0, IDLE);
}

/* Claim the next call of a lane, and run it: 1; 0: there was none. The caller has a reference to the lane. */
static int serve_next(Server *self, Line *line) {
    if (!line->is_open || !take_ring(line->doorbell)) return 0;
    uint64_t call = line->last_call + 1, at = place_of(line->address, call);
    if (load64(at + NUMBER) != call) { /* it rings for what it has not put */
        PyObject *done = PyObject_CallFunctionObjArgs(self->its.mute, line->its.lane, NULL);
        Py_XDECREF(done);
        return done ? 0 : -1;
    }
    uint64_t plan = load64(at + PLAN), nbytes = load64(at + CALL_BYTES);
    nbytes = nbytes < MAX_CALL_BYTES ? nbytes : MAX_CALL_BYTES;
    line->last_call = call;
    PyObject *number = PyLong_FromUnsignedLongLong(plan);
    PyObject *body = PyBytes_FromStringAndSize((const char *)at + REFS_AT, (Py_ssize_t)nbytes);
    PyObject *key = number && body ? PyTuple_Pack(2, number, body) : NULL;
    PyObject *bound = key ? PyDict_GetItemWithError(line->its.ready, key) : NULL;
    int status = -1;
    if (bound) {
        Py_INCREF(bound);
        status = run(self, line, call, plan, bound, nbytes);
        Py_DECREF(bound);
    } else if (key && !PyErr_Occurred()) {
        PyObject *done = PyObject_CallFunction(self->its.serve, "O(KOO)", line->its.lane, (unsigned long long)call, number, body);
        self->is_wanted |= done == Py_True;
        Py_XDECREF(done);
        status = done ? 0 : -1;
        self->now_ns = clock_ns();
    }
    Py_XDECREF(number);
    Py_XDECREF(body);
    Py_XDECREF(key);
    if (status < 0) return -1;
    keep(&self->its.latest, line->is_open ? (PyObject *)line : NULL);
    return 1;
}

/* --- which one is next */

/* How long it took until the client had put this call; 0: it has not, for so long. */
static uint64_t await_call(uint64_t page, uint64_t call, uint64_t within_ns) {
    uint64_t start = clock_ns(), now = start;
    while (now - start < within_ns) {
        for (int n = 0; n < LOOKS; n++) {
            if (load64(page + CALL) >= call) return clock_ns() - start + 1;
            relax();
        }
        now = clock_ns();
    }
    return 0;
}

/* Serve the lane that had the last call, if it has the next one soon: 1, and nobody slept. */
static int follow(Server *self) {
    Line *line = (Line *)self->its.latest;
    if (load64(line->address + CALL) <= line->last_call) {
        uint64_t spin_ns = wanted_ns(&self->watch, &self->cores, self->spin_ns), seen_ns;
        if (!spin_ns) return 0;
        Py_BEGIN_ALLOW_THREADS
        seen_ns = await_call(line->address, line->last_call + 1, spin_ns);
        Py_END_ALLOW_THREADS
        note_watch(&self->watch, seen_ns);
        if (!seen_ns) return 0;
    }
    int status = 0;
    Py_INCREF((PyObject *)line);
    for (int n = 0; n < MAX_TAKES && !status && line->is_open; n++) { /* its ring is there, or comes at once */
        status = serve_next(self, line);
        if (!status) relax();
    }
    Py_DECREF((PyObject *)line);
    return status;
}

/* What there is to be looked at, MOST at a time; who was told of comes last the next time. The number, or -1. */
static int ask_all(Server *self, struct epoll_event *found, int timeout) {
    int count;
    if (!timeout) {
        count = epoll_wait(self->epoll, found, MOST, 0);
    } else {
        Py_BEGIN_ALLOW_THREADS
        count = epoll_wait(self->epoll, found, MOST, timeout);
        Py_END_ALLOW_THREADS
    }
    if (count < 0 && errno != EINTR) return PyErr_SetFromErrno(PyExc_OSError), -1;
    return count < 0 ? PyErr_CheckSignals() : count;
}

/* Serve calls of lanes, in turns, until a socket has something, too, or `serve` says that the loop is wanted: what poll says of
   sockets. */
static PyObject *Server_serve(Server *self, PyObject *unused) {
    uint64_t asked_ns = 0;
    int served = 0; /* lanes, in the last turn: while several have calls, none is followed */
    (void)unused;
    for (;;) {
        int status = served < 2;
        while (status > 0 && self->its.latest && !self->is_wanted) {
            status = follow(self);
            if (status < 0) return NULL;
            if (!status) Py_CLEAR(self->its.latest);
            else if (self->now_ns - asked_ns > TURN_NS) break;
        }
        uint64_t changes = self->changes;
        struct epoll_event found[MOST];
        int count = ask_all(self, found, self->its.latest || self->is_wanted ? 0 : -1);
        if (count < 0) return NULL;
        served = 0;
        if (!count && !self->is_wanted) {
            asked_ns = self->now_ns;
            continue;
        }
        for (int n = 0; n < count && changes == self->changes; n++) { /* one call of each; one that changes comes another time */
            if (found[n].data.u64 < SOCKETS) continue;
            Line *line = (Line *)found[n].data.ptr; /* in `lines` */
            Py_INCREF((PyObject *)line);
            status = serve_next(self, line);
            Py_DECREF((PyObject *)line);
            if (status < 0) return NULL;
            served += status;
        }
        asked_ns = self->now_ns;
        PyObject *news = self->is_wanted ? PyList_New(0) : NULL;
        self->is_wanted = 0;
        for (int n = 0; n < count; n++) {
            if (found[n].data.u64 >= SOCKETS) continue;
            PyObject *one = Py_BuildValue("(ii)", self->sockets[found[n].data.u64], (int)found[n].events);
            if ((!news && !(news = PyList_New(0))) || !one || PyList_Append(news, one) < 0) {
                Py_XDECREF(one);
                Py_XDECREF(news);
                return NULL;
            }
            Py_DECREF(one);
        }
        if (news) return news;
    }
}

static PyObject *Server_add(Server *self, PyObject *line) {
    if (Py_TYPE(line) != line_type) return PyErr_Format(PyExc_TypeError, "a line is needed");
    if (listen_to(self, ((Line *)line)->doorbell, (uint64_t)line) < 0 || PyList_Append(self->its.lines, line) < 0) return NULL;
    ((Line *)line)->is_open = 1, self->changes++;
    Py_RETURN_NONE;
}

/* Nothing more is served there. */
static PyObject *Server_remove(Server *self, PyObject *line) {
    for (Py_ssize_t n = PyList_Size(self->its.lines) - 1; n >= 0; n--) {
        if (PyList_GetItem(self->its.lines, n) != line) continue;
        epoll_ctl(self->epoll, EPOLL_CTL_DEL, ((Line *)line)->doorbell, NULL);
        ((Line *)line)->is_open = 0, self->changes++;
        if (self->its.latest == line) Py_CLEAR(self->its.latest);
        if (PyList_SetSlice(self->its.lines, n, n + 1, NULL) < 0) return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef server_methods[] = {
    {"add", (PyCFunction)Server_add, METH_O, "add(line): its calls are served"},
    {"remove", (PyCFunction)Server_remove, METH_O, "remove(line): they are not any more"},
    {"serve", (PyCFunction)Server_serve, METH_NOARGS, "serve(): [(socket, events), ...] when one has something"},
    {NULL, NULL, 0, NULL},
};
static PyMethodDef line_methods[] = {
    {"tell", (PyCFunction)Line_tell, METH_O, "tell(call): wake who sleeps until it has ended"},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef line_members[] = {
    {"last_call", T_ULONGLONG, offsetof(Line, last_call), 0, "that was claimed"},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot Line_slots[] = {{Py_tp_new, Line_new}, {Py_tp_traverse, Line_traverse}, {Py_tp_clear, Line_clear},
                                  {Py_tp_dealloc, Line_dealloc}, {Py_tp_methods, line_methods}, {Py_tp_members, line_members}, {0, NULL}};
static PyType_Slot Server_slots[] = {{Py_tp_new, Server_new}, {Py_tp_traverse, Server_traverse}, {Py_tp_clear, Server_clear},
                                    {Py_tp_dealloc, Server_dealloc}, {Py_tp_methods, server_methods}, {0, NULL}};
static PyType_Spec Line_spec = {"layerzero.workers._serving.Line", sizeof(Line), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, Line_slots};
static PyType_Spec Server_spec = {"layerzero.workers._serving.Server", sizeof(Server), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, Server_slots};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_serving", "Calls of express lanes, served.", -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__serving(void) {
    PyObject *made = PyModule_Create(&module);
    if (!made) return NULL;
    PyObject *line = PyType_FromSpec(&Line_spec), *server = PyType_FromSpec(&Server_spec);
    PyObject *layout = Py_BuildValue("(iiiiiiiiiiiiiiiiiiiiiiiiiiiiii)", LANE_LAYOUT, IDLE, MAPPED, EXECUTING, WRITTEN, COUNT_AT, CALLS_AT, MOST_RECENT,
                                     RECENT_BYTES, TAIL_BYTES, RUNNING, HAS_ENDED, HAS_RAISED);
    line_type = (PyTypeObject *)line; /* with its reference */
    if (!line || !server || !layout || PyModule_AddObjectRef(made, "Line", line) < 0 || PyModule_AddObjectRef(made, "Server", server) < 0 ||
        PyModule_AddObjectRef(made, "LAYOUT", layout) < 0)
        Py_CLEAR(made);
    Py_XDECREF(server);
    Py_XDECREF(layout);
    return made;
}
