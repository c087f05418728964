/* Calls on a GPU that are made again, in C: what GpuCalls.run_known does, for the plain case.

   What is not plain (a stream's first call, a full ring, a capture, another GPU's context) is left to the Python; nothing
   is enqueued then. Errors after the call was put on its ring end there, too. Layouts are those of
   ipc/shm/timeline_words.py, ipc/shm/ring_words.py and ipc/cuda/abi.py: LAYOUT lets Python compare them. The interpreter's lock is
   let go of around calls of the driver, which may block: what frees them may be another thread. */

#include "_call_key.h"
#include "_counting.h"

#include <unistd.h>

enum { TIMELINE_BYTES = 512, DONE = 128, FAILURE = 256, TIMELINES = 64 };                /* bytes; ipc/shm/timeline_page.py */
enum { SLOTS = 512, SLOT_BYTES = 512, FIRST_SLOT = 8192, SLOT_HEAD = 40 };                /* ipc/shm/ring.py */
enum { EPOCH = 0, IS_ENDED = 8, HEAD = 128, IS_ASLEEP = 264 };                            /* bytes; ipc/shm/ring.py */
enum { BUFFER_ID = 7, WAIT_32 = 1, WRITE_32 = 2, GEQ = 0 };                               /* ipc/cuda/abi.py */
enum { READ_EVERY = 64, LOOK_EVERY = 16, MAX_AHEAD = 256, MAX_LATE = 8192, PER_THREAD = 2 };

typedef struct { /* CUstreamBatchMemOpParams */
    int32_t operation, unused;
    uint64_t address, value;
    uint32_t flags, unused_too;
    uint64_t alias, rest;
} WordOp;

/* --- objects of Python, each in a table, so that what owns them is written once */

#define REPEATS(X) \
    X(known) X(calls) X(outcomes) X(late) X(failed) X(numbers) X(last) X(record_type) X(turn_type) X(miss)
#define SITE(X) \
    X(gpu) X(lane) X(lease) X(route) X(transport) X(on_the_way) X(streams) X(next_numbers) X(seen_failures) X(points) X(routes) X(acquire) \
    X(release) X(stream_of) X(device) X(empty) X(form) X(make) X(places)
#define NAMES(X) \
    X(site) X(lease) X(is_armed) X(transport) X(is_open) X(is_closed) X(is_closing) X(point) X(call) X(end_ns) X(record) \
    X(expect) X(look) X(run_known) X(wait_for_room) X(tell_and_enter) X(enter)

NAMES(NAME)
static const char *const repeats_names[] = {REPEATS(TEXT) KEY_TYPES(TEXT)}, *const site_names[] = {SITE(TEXT)};
enum { REPEATS_FIELDS = sizeof repeats_names / sizeof *repeats_names, SITE_FIELDS = sizeof site_names / sizeof *site_names };

typedef union {
    struct {
        REPEATS(FIELD)
        KeyTypes types;
    };
    PyObject *of[REPEATS_FIELDS];
} RepeatsFields;
typedef struct {
    PyObject_HEAD
    RepeatsFields its;
    uint64_t count;
} Repeats;

typedef union {
    struct { SITE(FIELD) };
    PyObject *of[SITE_FIELDS];
} CallSiteFields;
typedef struct {
    PyObject_HEAD
    CallSiteFields its;
    uint64_t order, order_device, ring, epoch, context, plan, number, doorbell, row; /* row: in the page of counters */
    uint64_t get_current, is_capturing, get_attribute, batch; /* addresses of functions of the driver */
} CallSite;
static const char *const site_numbers[] = {"order", "order_device", "ring", "epoch", "context", "plan", "number",
                                           "doorbell", "row", "get_current", "is_capturing", "get_attribute", "batch"};
enum { SITE_NUMBERS = sizeof site_numbers / sizeof *site_numbers };

static PyObject *Repeats_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    Repeats *self = (Repeats *)make(type);
    if (self && (!kwargs || take_all(kwargs, repeats_names, REPEATS_FIELDS, self->its.of) < 0)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "keyword arguments are needed");
        Py_CLEAR(self);
    }
    (void)args;
    return (PyObject *)self;
}

static PyObject *CallSite_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    CallSite *self = (CallSite *)make(type);
    (void)args;
    if (!self) return NULL;
    if (!kwargs) PyErr_SetString(PyExc_TypeError, "keyword arguments are needed");
    if (!kwargs || take_all(kwargs, site_names, SITE_FIELDS, self->its.of) < 0 ||
        take_numbers(kwargs, site_numbers, SITE_NUMBERS, &self->order) < 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

LIFE(Repeats, REPEATS_FIELDS)
LIFE(CallSite, SITE_FIELDS)

/* One call on its way through the stages below. All but `request`, `start_ns` and `refs` are its own references. */
typedef struct {
    Parts parts;
    PyObject *request, *start_ns, *known, *stream_key, *result, *place, *record, *point;
    CallSite *site;
    PyObject *refs;
    uint64_t stream;
    long timeline;
    uint32_t number;
} Call;

static void drop(Call *call) {
    PyObject *mine[] = {(PyObject *)call->site, call->known,  call->stream_key, call->result,
                        call->place,            call->record, call->point};
    for (size_t n = 0; n < sizeof mine / sizeof *mine; n++) Py_XDECREF(mine[n]);
    drop_parts(&call->parts);
}

/* --- the stages of a call */

static int is_done(const CallSite *site, uint64_t timeline, uint32_t number) {
    return (int32_t)(load32(site->order + timeline * TIMELINE_BYTES + DONE) - number) >= 0;
}

/* Its site, if the call was made before on the same addresses. */
static Verdict find(Repeats *self, Call *call) {
    Key key;
    key.is_placed = 1, key.count = 0, key.used = 0;
    Verdict verdict = write_key(&self->its.types, call->request, &call->parts, &key);
    if (verdict != PLAIN) return verdict;
    PyObject *bytes = PyBytes_FromStringAndSize(key.bytes, key.used);
    if (!bytes) return FAILED;
    call->known = PyDict_GetItemWithError(self->its.known, bytes);
    Py_XINCREF(call->known);
    Py_DECREF(bytes);
    if (!call->known) return PyErr_Occurred() ? FAILED : UNKNOWN;
    call->site = (CallSite *)PyObject_GetAttr(call->known, s_site);
    if (!call->site) return FAILED;
    if ((PyObject *)call->site == Py_None) return OTHERS;
    const CallSiteFields *its = &call->site->its;
    PyObject *lease = PyObject_GetAttr(its->route, s_lease), *transport = PyObject_GetAttr(its->gpu, s_transport);
    int is_armed = has(its->route, s_is_armed);
    int is_current = lease == its->lease && is_armed > 0 && transport && PyUnicode_Compare(transport, its->transport) == 0;
    Py_XDECREF(lease);
    Py_XDECREF(transport);
    if (PyErr_Occurred()) return FAILED;
    return is_current ? PLAIN : OTHERS;
}

/* The caller's stream; errors of earlier calls are raised here. */
static Verdict find_stream(Repeats *self, Call *call) {
    const CallSiteFields *its = &call->site->its;
    call->stream_key = its->device == Py_None ? PyObject_CallNoArgs(its->stream_of)
                                              : PyObject_CallFunctionObjArgs(its->stream_of, its->device, NULL);
    if (!call->stream_key) return FAILED;
    call->stream = PyLong_AsUnsignedLongLong(call->stream_key);
    if (PyErr_Occurred()) return FAILED;
    int is_closing = has(self->its.calls, s_is_closing); /* then the pages may be gone */
    if (is_closing) return is_closing < 0 ? FAILED : OTHERS;
    PyObject *timeline = PyDict_GetItemWithError(its->streams, call->stream_key), *seen;
    if (!timeline || call->stream == PER_THREAD) return PyErr_Occurred() ? FAILED : OTHERS;
    call->timeline = PyLong_AsLong(timeline);
    if (call->timeline < 0 || call->timeline >= TIMELINES || !(seen = PyList_GetItem(its->seen_failures, call->timeline)))
        return PyErr_Occurred() ? FAILED : OTHERS;
    uint64_t failure = load64(call->site->order + call->timeline * TIMELINE_BYTES + FAILURE);
    int has_news = failure != PyLong_AsUnsignedLongLong(seen);
    if (++self->count % READ_EVERY == 0 || has_news || PyObject_Size(self->its.failed) > 0) {
        PyObject *looked = PyObject_CallMethodObjArgs(self->its.calls, s_look, its->gpu, NULL);
        if (!looked) return FAILED;
        Py_DECREF(looked);
    }
    return PyErr_Occurred() ? FAILED : PLAIN;
}

/* Whether the GPU's context is current, and the stream not captured. */
static Verdict ask_driver(const Call *call) {
    const CallSite *site = call->site;
    void *context = NULL;
    int error, status = 0;
    Py_BEGIN_ALLOW_THREADS
    error = ((int (*)(void **))site->get_current)(&context);
    if (!error && (uint64_t)context == site->context)
        error = ((int (*)(void *, int *))site->is_capturing)((void *)call->stream, &status);
    Py_END_ALLOW_THREADS
    return error || status || (uint64_t)context != site->context ? OTHERS : PLAIN;
}

/* The result, and the references of all memory if it is what it was. */
static Verdict find_memory(Call *call) {
    const CallSiteFields *its = &call->site->its;
    PyObject *address = NULL, *ignored = NULL;
    Py_ssize_t at = 0;
    if (call->parts.out != Py_None) { /* its address is in the key */
        Py_INCREF(call->parts.out);
        call->result = call->parts.out;
        if (!PyDict_Next(its->places, &at, &address, &ignored)) return OTHERS;
        Py_INCREF(address);
    } else if (its->empty != Py_None) {
        call->result = PyObject_CallObject(its->empty, its->form);
        if (call->result) address = PyObject_CallMethodObjArgs(call->result, s_data_ptr, NULL);
    } else { /* (result, address) */
        PyObject *made = PyObject_CallFunctionObjArgs(its->make, PyTuple_GetItem(call->parts.args, 0), NULL);
        if (made && PyTuple_Check(made) && PyTuple_Size(made) == 2) {
            call->result = PyTuple_GetItem(made, 0);
            address = PyTuple_GetItem(made, 1);
            Py_INCREF(call->result);
            Py_INCREF(address);
        }
        Py_XDECREF(made);
    }
    if (!address) return PyErr_Occurred() ? FAILED : OTHERS;
    call->place = PyDict_GetItemWithError(its->places, address);
    Py_XINCREF(call->place);
    Py_DECREF(address);
    if (!call->place) return PyErr_Occurred() ? FAILED : OTHERS;
    call->refs = PyTuple_GetItem(call->place, 0);
    PyObject *owners = PyTuple_GetItem(call->place, 1); /* pairs of an address and the id of its allocation */
    if (!call->refs || !owners) return FAILED;
    uint64_t inside[8], expected[8], found = 0;
    Py_ssize_t count = PyTuple_Size(owners);
    if (count > 8) return OTHERS;
    for (Py_ssize_t n = 0; n < count; n++) {
        PyObject *pair = PyTuple_GetItem(owners, n);
        inside[n] = PyLong_AsUnsignedLongLong(PyTuple_GetItem(pair, 0));
        if (PyErr_Occurred()) return FAILED;
        expected[n] = PyLong_AsUnsignedLongLong(PyTuple_GetItem(pair, 1));
        if (PyErr_Occurred()) return FAILED;
    }
    int is_same = 1;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t n = 0; is_same && n < count; n++, found = 0)
        is_same = !((int (*)(void *, int, uint64_t))call->site->get_attribute)(&found, BUFFER_ID, inside[n]) &&
                  found == expected[n];
    Py_END_ALLOW_THREADS
    return is_same ? PLAIN : OTHERS;
}

/* Whether the lane may take a call now. The GPU's lock is held. */
static Verdict ask_lane(const Repeats *self, const Call *call, uint64_t *number_on_ring) {
    const CallSite *site = call->site;
    if (PyDict_Size(site->its.on_the_way)) return OTHERS; /* it must not pass the broker's calls */
    PyObject *now = PyDict_GetItemWithError(site->its.streams, call->stream_key); /* another stream's, perhaps */
    if (!now || PyLong_AsLong(now) != call->timeline) return PyErr_Occurred() ? FAILED : OTHERS;
    int is_shut = has(self->its.calls, s_is_closing);
    if (!is_shut) is_shut = has(site->its.lane, s_is_closed);
    int is_open = is_shut ? 0 : has(site->its.lane, s_is_open);
    if (is_shut < 0 || is_open < 0) return FAILED;
    if (!is_open || load64(site->ring + EPOCH) != site->epoch || load64(site->ring + IS_ENDED)) return OTHERS;
    *number_on_ring = load64(site->ring + HEAD) + 1;
    PyObject *before = PyList_GetItem(site->its.points, (*number_on_ring + 1) % SLOTS);
    if (!before) return FAILED;
    if (before == Py_None) return PLAIN; /* else one slot stays free: the broker may be reading it */
    long timeline = PyLong_AsLong(PyTuple_GetItem(before, 0));
    uint32_t number = (uint32_t)PyLong_AsUnsignedLongLong(PyTuple_GetItem(before, 1));
    if (PyErr_Occurred()) return FAILED;
    return timeline >= 0 && timeline < TIMELINES && is_done(site, timeline, number) ? PLAIN : OTHERS;
}

static int set_item(PyObject *list, Py_ssize_t at, PyObject *value) {
    Py_XINCREF(value);
    return value ? PyList_SetItem(list, at, value) : -1;
}

/* Onto the ring, READY, and the stream waits for DONE. The GPU's lock is held. Until the line that is marked nothing has
   happened that anybody sees; what may run Python comes before the ring and the timeline are looked at. */
static Verdict put(Repeats *self, Call *call) {
    CallSite *site = call->site;
    CallSiteFields *its = &site->its;
    Verdict verdict = FAILED;
    uint64_t on_ring, sequence = 0;
    uint32_t number = 0;
    char *refs;
    Py_ssize_t nbytes;
    PyObject *hold = NULL, *copies = NULL, *position = NULL, *next = NULL, *pair = NULL, *seq = NULL, *last, *left = NULL;
    newfunc make_point = (newfunc)PyType_GetSlot(&PyTuple_Type, Py_tp_new);
    if (PyBytes_AsStringAndSize(call->refs, &refs, &nbytes) < 0) goto end;
    if (nbytes > SLOT_BYTES - SLOT_HEAD) {
        verdict = OTHERS;
        goto end;
    }
    if (!(hold = PyTuple_Pack(2, call->parts.args, call->result)) || !(copies = PyTuple_New(0))) goto end;
    call->record = PyObject_CallFunctionObjArgs(self->its.record_type, self->its.outcomes, its->gpu, its->lane, its->lease,
                                                call->parts.op, its->route, copies, call->start_ns, NULL);
    if (!call->record || !(seq = PyIter_Next(self->its.numbers))) goto end;
    sequence = PyLong_AsUnsignedLongLong(seq);
    if (PyErr_Occurred()) goto end;
    if (PyDict_Size(self->its.late) >= MAX_LATE) {
        PyObject *expected = PyObject_CallMethodObjArgs(self->its.outcomes, s_expect, seq, call->record, NULL);
        if (!expected) goto end;
        Py_DECREF(expected);
    } else if (PyDict_SetItem(self->its.late, seq, call->record) < 0)
        goto end;
    verdict = ask_lane(self, call, &on_ring);
    if (verdict != PLAIN) goto end;
    verdict = FAILED;
    if (!(last = PyList_GetItem(its->next_numbers, call->timeline))) goto end;
    number = call->number = (uint32_t)PyLong_AsUnsignedLongLong(last);
    if (PyErr_Occurred()) goto end;
    if (!(position = PyLong_FromUnsignedLongLong(on_ring)) || !(next = PyLong_FromUnsignedLong((uint32_t)(number + 1))) ||
        !(pair = Py_BuildValue("((lk))", call->timeline, (unsigned long)number)) ||
        !(call->point = make_point((PyTypeObject *)self->its.turn_type, pair, NULL)))
        goto end;
    uint64_t slot = on_ring % SLOTS;
    if (PyObject_SetAttr(call->record, s_point, call->point) < 0 || PyObject_SetAttr(call->record, s_call, position) < 0 ||
        set_item(its->points, slot, call->point) < 0 || set_item(its->routes, slot, its->route) < 0 ||
        set_item(its->next_numbers, call->timeline, next) < 0)
        goto end;
    /* From here on the point is taken: it must end. */
    uint8_t *at = (uint8_t *)(site->ring + FIRST_SLOT + slot * SLOT_BYTES);
    uint64_t length = (uint64_t)nbytes;
    uint32_t words[] = {(uint32_t)site->number, (uint32_t)site->plan}, point[] = {(uint32_t)call->timeline, number};
    memcpy(at, &on_ring, 8);
    memcpy(at + 8, words, 8);
    memcpy(at + 16, &sequence, 8);
    memcpy(at + 24, point, 8);
    memcpy(at + 32, &length, 8);
    memcpy(at + SLOT_HEAD, refs, nbytes);
    __atomic_store_n((uint64_t *)(site->ring + HEAD), on_ring, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* what was put is seen before what follows is read */
    if (load64(site->ring + IS_ASLEEP)) {
        uint64_t one = 1;
        if (write((int)site->doorbell, &one, 8) < 0) { /* it is rung already */
        }
    }
    if (load64(site->ring + IS_ENDED)) { /* the broker may not have seen the call */
        left = PyObject_CallMethodObjArgs(self->its.calls, s_tell_and_enter, call->record, seq, call->stream_key, call->refs,
                                          hold, NULL);
    } else {
        uint64_t ready = site->order_device + (uint64_t)call->timeline * TIMELINE_BYTES;
        WordOp ops[2] = {{.operation = WRITE_32, .address = ready, .value = number},
                         {.operation = WAIT_32, .address = ready + DONE, .value = number, .flags = GEQ}};
        int error;
        Py_BEGIN_ALLOW_THREADS
        error = ((int (*)(void *, unsigned, WordOp *, unsigned))site->batch)((void *)call->stream, 2, ops, 0);
        Py_END_ALLOW_THREADS
        left = error ? PyObject_CallMethodObjArgs(self->its.calls, s_enter, call->record, call->stream_key, hold, NULL)
                     : (Py_INCREF(Py_None), Py_None);
    }
    verdict = left ? PLAIN : FAILED;
end:
    if (verdict == OTHERS && seq && PyDict_DelItem(self->its.late, seq) < 0) PyErr_Clear();
    Py_XDECREF(hold);
    Py_XDECREF(copies);
    Py_XDECREF(position);
    Py_XDECREF(next);
    Py_XDECREF(pair);
    Py_XDECREF(seq);
    Py_XDECREF(left);
    return verdict;
}

static Verdict put_locked(Repeats *self, Call *call) {
    PyObject *locked = PyObject_CallNoArgs(call->site->its.acquire), *released, *type, *value, *trace;
    if (!locked) return FAILED;
    Py_DECREF(locked);
    Verdict verdict = put(self, call);
    PyErr_Fetch(&type, &value, &trace);
    released = PyObject_CallNoArgs(call->site->its.release);
    Py_XDECREF(released);
    PyErr_Restore(type, value, trace);
    return verdict;
}

/* The queues are finite; and what a report will be made of. */
static Verdict finish(Repeats *self, Call *call) {
    const CallSiteFields *its = &call->site->its;
    if (call->number % LOOK_EVERY == 0 && !is_done(call->site, call->timeline, call->number - MAX_AHEAD)) {
        PyObject *waited = PyObject_CallMethodObjArgs(its->gpu, s_wait_for_room, call->point, NULL);
        if (!waited) return FAILED;
        Py_DECREF(waited);
    }
    uint64_t now_ns = clock_ns();
    count_call(call->site->row, call->start_ns, now_ns, 0);
    PyObject *end_ns = PyLong_FromUnsignedLongLong(now_ns);
    int is_noted = end_ns && PyObject_SetAttr(call->record, s_end_ns, end_ns) == 0 &&
                   PyObject_SetAttr(self->its.last, s_record, call->record) == 0;
    Py_XDECREF(end_ns);
    return is_noted ? PLAIN : FAILED;
}

static PyObject *Repeats_run(Repeats *self, PyObject *const *given, Py_ssize_t count) {
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "run(request, start_ns)");
        return NULL;
    }
    Call call = {.request = given[0], .start_ns = given[1]};
    Verdict verdict = PyDict_Size(self->its.known) ? find(self, &call) : UNKNOWN;
    if (verdict == PLAIN) verdict = find_stream(self, &call);
    if (verdict == PLAIN) verdict = ask_driver(&call);
    if (verdict == PLAIN) verdict = find_memory(&call);
    if (verdict == PLAIN) verdict = put_locked(self, &call);
    if (verdict == PLAIN) verdict = finish(self, &call);
    PyObject *result = NULL;
    if (verdict == PLAIN) result = call.result;
    if (verdict == UNKNOWN) result = self->its.miss;
    Py_XINCREF(result);
    drop(&call);
    if (verdict == OTHERS) result = PyObject_CallMethodObjArgs(self->its.calls, s_run_known, given[0], given[1], NULL);
    return result;
}

/* By which a call is known here; None for one that this file leaves to the Python. */
static PyObject *Repeats_key(Repeats *self, PyObject *request) {
    Call call = {.request = request};
    Key key;
    key.is_placed = 1, key.count = 0, key.used = 0;
    Verdict verdict = write_key(&self->its.types, request, &call.parts, &key);
    drop(&call);
    if (verdict == FAILED) return NULL;
    if (verdict == PLAIN) return PyBytes_FromStringAndSize(key.bytes, key.used);
    Py_RETURN_NONE;
}

static PyObject *Repeats_learn(Repeats *self, PyObject *args, PyObject *kwargs) {
    (void)args;
    return learn_all(kwargs, repeats_names, REPEATS_FIELDS, self->its.of);
}

static PyMethodDef repeats_methods[] = {
    {"run", (PyCFunction)(void (*)(void))Repeats_run, METH_FASTCALL, "run(request, start_ns): the result, or `miss`"},
    {"key", (PyCFunction)Repeats_key, METH_O, "key(request): bytes, or None"},
    {"learn", (PyCFunction)(void (*)(void))Repeats_learn, METH_VARARGS | METH_KEYWORDS, "learn(tensor=..., ...)"},
    {NULL, NULL, 0, NULL},
};

SLOTS_OF("_fastpath", Repeats, {Py_tp_methods, repeats_methods},)
SLOTS_OF("_fastpath", CallSite, )

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_fastpath", "Calls on a GPU that are made again.", -1, NULL};

PyMODINIT_FUNC PyInit__fastpath(void) {
    PyObject *made = PyModule_Create(&module);
    if (!made) return NULL;
    KEY_NAMES(INTERN)
    NAMES(INTERN)
    PyObject *layout = Py_BuildValue("(iiiiiiiiiiiiiiiiiiiii)", TIMELINES, TIMELINE_BYTES, DONE, FAILURE, SLOTS, SLOT_BYTES, FIRST_SLOT,
                                     SLOT_HEAD, EPOCH, IS_ENDED, HEAD, IS_ASLEEP, BUFFER_ID, WAIT_32, WRITE_32, GEQ, COUNTER_LAYOUT);
    PyObject *limits = Py_BuildValue("(iiiii)", READ_EVERY, LOOK_EVERY, MAX_AHEAD, MAX_LATE, PER_THREAD);
    PyObject *repeats = PyType_FromSpec(&Repeats_spec), *site = PyType_FromSpec(&CallSite_spec);
    if (!layout || !limits || !repeats || !site || PyModule_AddObjectRef(made, "LAYOUT", layout) < 0 ||
        PyModule_AddObjectRef(made, "LIMITS", limits) < 0 ||
        PyModule_AddObjectRef(made, "Repeats", repeats) < 0 || PyModule_AddObjectRef(made, "CallSite", site) < 0)
        Py_CLEAR(made);
    Py_XDECREF(layout);
    Py_XDECREF(limits);
    Py_XDECREF(repeats);
    Py_XDECREF(site);
    return made;
}
