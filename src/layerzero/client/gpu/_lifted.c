/* Lifted calls on a GPU (docs/lifting.md) that are made again, in C: what client/gpu/lifting/lifts.py does, for the plain
   case.

   What is not plain (a stream's first call, a capture, another GPU's context, more scratch than there is) is left to the
   Python; nothing is enqueued then. Layouts are those of ipc/lifting/program.py and ipc/shm/timeline_words.py: LAYOUT and
   PROGRAM let Python compare them. The interpreter's lock is let go of around calls of the driver, which may block: what
   frees them may be another thread. The page is touched with the lock, and only while the session is not being closed. */

#include "_call_key.h"
#include "_counting.h"

#include <stddef.h>

enum { TIMELINES = 64, TIMELINE_BYTES = 512, FAILURE = 256, LIFTED_COUNT = 384, LIFTED_LAST = 388, KEPT = 8, LIFT_EPOCH = 448 };
enum { KERNEL = 1, FILL = 2, COPY = 3 };
enum { MAX_PARAMETERS = 1024, MAX_PARAMETER_BYTES = 32764, MAX_TENSORS = 16, MAX_MEMORY = 96 };
enum { PARAMETERS_AT = 64 }; /* alignment of a block of parameters: tensor maps lie at multiples of that */
enum { READ_EVERY = 64, PER_THREAD = 2, SCRATCH_ALIGNMENT = 512 };
#define NONE UINT64_MAX
#define OWN (UINT64_C(1) << 63)

typedef struct { uint64_t nbytes; uint32_t kind, itemsize; } Head;
typedef struct {
    uint64_t function;
    uint32_t grid[3], block[3], shared, attribute_count;
    uint32_t nbytes, parameter_count, patch_count, unused;
} KernelStep;
typedef struct { int32_t id, padding; uint8_t value[64]; } Attribute; /* CUlaunchAttribute */
typedef struct { uint32_t at, memory; int64_t offset; } Patch;
typedef struct { uint32_t memory, value; int64_t offset; uint64_t count; } FillStep;
typedef struct { uint32_t source, target; int64_t source_offset, target_offset; uint64_t nbytes; } CopyStep;
typedef struct { /* CUlaunchConfig */
    uint32_t grid[3], block[3], shared;
    void *stream;
    const Attribute *attributes;
    uint32_t attribute_count;
} Config;
typedef struct { uint64_t mask, nbytes, alias; } Tensor; /* alias: the input that an output is; OWN and its offset for a new one */
typedef struct { uint64_t one, other, is_same_only; } Pair; /* what must not share memory, or not begin in one place */

#define LIFTS(X) X(known) X(lifts) X(failed) X(last) X(next) X(miss)
#define SITE(X) \
    X(site) X(gpu) X(streams) X(seen_failures) X(scratch) X(stream_of) X(device) X(empty) X(form) X(make) X(program) X(tensors) \
    X(pairs) X(pieces) X(plan) X(decision) X(note)
#define NAMES(X) X(compiled) X(record) X(look) X(run_otherwise) X(count_down) X(renew) X(fail) X(arrive)
NAMES(NAME)
static PyObject *nothing, *zero; /* () and 0 */

static const char *const lifts_names[] = {LIFTS(TEXT) KEY_TYPES(TEXT)}, *const site_names[] = {SITE(TEXT)};
enum { LIFTS_FIELDS = sizeof lifts_names / sizeof *lifts_names, SITE_FIELDS = sizeof site_names / sizeof *site_names };

typedef union {
    struct {
        LIFTS(FIELD)
        KeyTypes types;
    };
    PyObject *of[LIFTS_FIELDS];
} LiftedCallsFields;
typedef struct {
    PyObject_HEAD
    LiftedCallsFields its;
    uint64_t count;
    int is_closed;
} LiftedCalls;

typedef union {
    struct { SITE(FIELD) };
    PyObject *of[SITE_FIELDS];
} LiftedSiteFields;
typedef struct {
    PyObject_HEAD
    LiftedSiteFields its;
    uint64_t order, epoch, number, context, inputs, outputs, scratch_bytes, is_ahead, row; /* is_ahead: no call was made here yet; row: of counters */
    uint64_t get_current, is_capturing, launch, fill_8, fill_16, fill_32, copy; /* addresses of functions of the driver */
    const uint8_t *program;
    const Tensor *tensors;
    const Pair *pairs;
    const uint64_t *pieces;
    size_t program_bytes, pair_count, piece_count;
} LiftedSite;
static const char *const site_numbers[] = {"order",  "epoch",  "number",  "context", "inputs", "outputs", "scratch_bytes", "is_ahead", "row", "get_current", "is_capturing",
                                           "launch", "fill_8", "fill_16", "fill_32", "copy"};
enum { SITE_NUMBERS = sizeof site_numbers / sizeof *site_numbers };

static PyObject *LiftedCalls_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    LiftedCalls *self = (LiftedCalls *)make(type);
    (void)args;
    if (!self) return NULL;
    if (!kwargs) PyErr_SetString(PyExc_TypeError, "keyword arguments are needed");
    if (!kwargs || take_all(kwargs, lifts_names, LIFTS_FIELDS, self->its.of) < 0) Py_CLEAR(self);
    return (PyObject *)self;
}

static int take_table(PyObject *bytes, size_t item, const void **table, size_t *count) {
    char *found;
    Py_ssize_t nbytes;
    if (PyBytes_AsStringAndSize(bytes, &found, &nbytes) < 0) return -1;
    *table = found;
    *count = (size_t)nbytes / item;
    return 0;
}

static PyObject *LiftedSite_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    LiftedSite *self = (LiftedSite *)make(type);
    size_t tensors = 0;
    (void)args;
    if (!self) return NULL;
    if (!kwargs) PyErr_SetString(PyExc_TypeError, "keyword arguments are needed");
    if (!kwargs || take_all(kwargs, site_names, SITE_FIELDS, self->its.of) < 0 ||
        take_numbers(kwargs, site_numbers, SITE_NUMBERS, &self->order) < 0 ||
        take_table(self->its.program, 1, (const void **)&self->program, &self->program_bytes) < 0 ||
        take_table(self->its.tensors, sizeof(Tensor), (const void **)&self->tensors, &tensors) < 0 ||
        take_table(self->its.pairs, sizeof(Pair), (const void **)&self->pairs, &self->pair_count) < 0 ||
        take_table(self->its.pieces, 8, (const void **)&self->pieces, &self->piece_count) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    if (tensors != self->inputs + self->outputs || tensors > MAX_TENSORS || tensors + self->piece_count > MAX_MEMORY) {
        PyErr_SetString(PyExc_ValueError, "tables of other lengths, or too long");
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

LIFE(LiftedSite, SITE_FIELDS)
LIFE(LiftedCalls, LIFTS_FIELDS)

/* --- launching, without the interpreter's lock */

typedef struct {
    uint64_t memory[MAX_MEMORY];
    void *stream;
    int step; /* at which the driver said no */
} Launch;

static int launch_kernel(const LiftedSite *site, const KernelStep *step, Launch *launch) {
    uint8_t room[MAX_PARAMETER_BYTES + 2 * PARAMETERS_AT];
    void *table[MAX_PARAMETERS];
    const Attribute *attributes = (const Attribute *)(step + 1);
    const uint8_t *params = (const uint8_t *)(attributes + step->attribute_count);
    const uint32_t *offsets = (const uint32_t *)(params + ((step->nbytes + 7) & ~7u));
    const Patch *patches = (const Patch *)(offsets + ((step->parameter_count + 1) & ~1u));
    uint8_t *start = (uint8_t *)(((uintptr_t)room + PARAMETERS_AT - 1) & ~(uintptr_t)(PARAMETERS_AT - 1));
    memcpy(start, params, step->nbytes);
    for (uint32_t n = 0; n < step->patch_count; n++) {
        uint64_t address = launch->memory[patches[n].memory] + (uint64_t)patches[n].offset;
        memcpy(start + patches[n].at, &address, 8);
    }
    for (uint32_t n = 0; n < step->parameter_count; n++) table[n] = start + offsets[n];
    if (!step->parameter_count) table[0] = NULL;
    Config config = {.shared = step->shared, .stream = launch->stream, .attributes = attributes,
                     .attribute_count = step->attribute_count};
    memcpy(config.grid, step->grid, sizeof config.grid);
    memcpy(config.block, step->block, sizeof config.block);
    return ((int (*)(const Config *, void *, void **, void **))site->launch)(&config, (void *)step->function, table, NULL);
}

static int fill(const LiftedSite *site, const FillStep *step, uint32_t itemsize, const Launch *launch) {
    uint64_t address = launch->memory[step->memory] + (uint64_t)step->offset;
    if (itemsize == 1)
        return ((int (*)(uint64_t, unsigned char, size_t, void *))site->fill_8)(address, step->value, step->count, launch->stream);
    if (itemsize == 2)
        return ((int (*)(uint64_t, unsigned short, size_t, void *))site->fill_16)(address, step->value, step->count, launch->stream);
    return ((int (*)(uint64_t, unsigned, size_t, void *))site->fill_32)(address, step->value, step->count, launch->stream);
}

static int copy(const LiftedSite *site, const CopyStep *step, const Launch *launch) {
    uint64_t source = launch->memory[step->source] + (uint64_t)step->source_offset;
    uint64_t target = launch->memory[step->target] + (uint64_t)step->target_offset;
    return ((int (*)(uint64_t, uint64_t, size_t, void *))site->copy)(target, source, step->nbytes, launch->stream);
}

/* All steps, in their order. The driver's error, or 0. */
static int launch_all(const LiftedSite *site, Launch *launch) {
    const uint8_t *at = site->program, *end = at + site->program_bytes;
    int error = 0;
    for (launch->step = 0; at < end; launch->step++) {
        const Head *head = (const Head *)at;
        const void *body = head + 1;
        error = head->kind == KERNEL ? launch_kernel(site, body, launch)
                : head->kind == FILL ? fill(site, body, head->itemsize, launch)
                                     : copy(site, body, launch);
        if (error) break;
        at += head->nbytes;
    }
    return error;
}

/* --- the stages of a call */

/* One call on its way. All but `request`, `start_ns` and `key` are its own references. */
typedef struct {
    Parts parts;
    PyObject *request, *start_ns, *result, *found, *place;
    LiftedSite *site;
    PyObject *stream_key;
    long timeline;
    Launch launch;
} Call;

static void drop(Call *call) {
    PyObject *mine[] = {(PyObject *)call->site, call->result, call->found, call->place, call->stream_key};
    for (size_t n = 0; n < sizeof mine / sizeof *mine; n++) Py_XDECREF(mine[n]);
    drop_parts(&call->parts);
}

static Verdict told(PyObject *answer, Verdict verdict) { /* takes the reference */
    Py_XDECREF(answer);
    return answer ? verdict : FAILED;
}

/* Its site, if a call with this key is lifted. */
static Verdict find(LiftedCalls *self, Call *call, Key *key) {
    Verdict verdict = write_key(&self->its.types, call->request, &call->parts, key);
    if (verdict != PLAIN) return verdict < 0 ? FAILED : UNKNOWN;
    PyObject *bytes = PyBytes_FromStringAndSize(key->bytes, key->used);
    if (!bytes) return FAILED;
    call->found = PyDict_GetItemWithError(self->its.known, bytes);
    Py_XINCREF(call->found);
    if (!call->found)
        verdict = PyErr_Occurred() ? FAILED : UNKNOWN;
    else if (PyLong_Check(call->found)) { /* calls to go until it is asked for again */
        long left = PyLong_AsLong(call->found) - 1;
        PyObject *now = left > 0 ? PyLong_FromLong(left) : NULL;
        if (left > 0)
            verdict = now && PyDict_SetItem(self->its.known, bytes, now) == 0 ? UNKNOWN : FAILED;
        else
            verdict = told(PyObject_CallMethodObjArgs(self->its.lifts, s_count_down, bytes, NULL), UNKNOWN);
        Py_XDECREF(now);
    }
    if (verdict == PLAIN && !(call->site = (LiftedSite *)PyObject_GetAttr(call->found, s_compiled)))
        verdict = FAILED;
    else if (verdict == PLAIN && ((PyObject *)call->site == Py_None || self->is_closed)) /* closed since it was looked at */
        verdict = OTHERS;
    else if (verdict == PLAIN && load32(call->site->order + LIFT_EPOCH) != (uint32_t)call->site->epoch)
        verdict = told(PyObject_CallMethodObjArgs(self->its.lifts, s_renew, bytes, call->found, NULL), UNKNOWN);
    Py_DECREF(bytes);
    return verdict;
}

/* The caller's stream; errors of earlier calls are raised here. */
static Verdict find_stream(LiftedCalls *self, Call *call) {
    const LiftedSiteFields *its = &call->site->its;
    call->stream_key = its->device == Py_None ? PyObject_CallNoArgs(its->stream_of)
                                              : PyObject_CallFunctionObjArgs(its->stream_of, its->device, NULL);
    if (!call->stream_key) return FAILED;
    uint64_t stream = PyLong_AsUnsignedLongLong(call->stream_key);
    if (PyErr_Occurred()) return FAILED;
    if (self->is_closed) return OTHERS;
    call->launch.stream = (void *)stream;
    PyObject *timeline = PyDict_GetItemWithError(its->streams, call->stream_key), *seen;
    if (!timeline || stream == PER_THREAD) return PyErr_Occurred() ? FAILED : OTHERS;
    call->timeline = PyLong_AsLong(timeline);
    if (call->timeline < 0 || call->timeline >= TIMELINES || !(seen = PyList_GetItem(its->seen_failures, call->timeline)))
        return PyErr_Occurred() ? FAILED : OTHERS;
    uint64_t failure = load64(call->site->order + call->timeline * TIMELINE_BYTES + FAILURE);
    if (++self->count % READ_EVERY == 0 || failure != PyLong_AsUnsignedLongLong(seen) || PyObject_Size(self->its.failed) > 0)
        return told(PyObject_CallMethodObjArgs(self->its.lifts, s_look, its->gpu, NULL), self->is_closed ? OTHERS : PLAIN);
    return PyErr_Occurred() ? FAILED : PLAIN;
}

/* Where all memory of the call is, a new result included, and whether it may lie there. */
static Verdict find_memory(const LiftedCalls *self, Call *call, const Key *key) {
    const LiftedSite *site = call->site;
    const LiftedSiteFields *its = &site->its;
    uint64_t *memory = call->launch.memory, made_at = NONE;
    if ((uint64_t)PyTuple_Size(call->parts.args) != site->inputs) return OTHERS;
    memcpy(memory, key->addresses, site->inputs * 8);
    if (call->parts.out != Py_None) {
        Py_INCREF(call->parts.out);
        call->result = call->parts.out;
        made_at = key->addresses[site->inputs];
    } else {
        PyObject *address = NULL;
        if (its->empty != Py_None) {
            DLTensor found;
            if (!(call->result = PyObject_CallObject(its->empty, its->form))) return FAILED;
            if (look(&self->its.types, call->result, &found))
                made_at = (uint64_t)found.data + found.offset;
            else
                address = PyObject_CallMethodObjArgs(call->result, s_data_ptr, NULL);
        } else if (its->make == Py_None) { /* what is written is an input */
            Py_INCREF(Py_None);
            call->result = Py_None;
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
        if (address) made_at = PyLong_AsUnsignedLongLong(address);
        Py_XDECREF(address);
        if (PyErr_Occurred()) return FAILED;
    }
    for (uint64_t n = site->inputs; n < site->inputs + site->outputs; n++) {
        uint64_t alias = site->tensors[n].alias;
        memory[n] = alias & OWN ? made_at + (alias & ~OWN) : memory[alias];
    }
    for (uint64_t n = 0; n < site->inputs + site->outputs; n++)
        if (memory[n] & site->tensors[n].mask) return OTHERS;
    for (size_t n = 0; n < site->pair_count; n++) {
        const Pair *pair = site->pairs + n;
        uint64_t one = memory[pair->one], other = memory[pair->other];
        if (pair->is_same_only ? one == other
                               : one < other + site->tensors[pair->other].nbytes && other < one + site->tensors[pair->one].nbytes)
            return OTHERS;
    }
    return PLAIN;
}

/* The stream's scratch, if it is large enough; its lock is taken then. */
static Verdict find_scratch(Call *call) {
    const LiftedSite *site = call->site;
    if (!site->scratch_bytes) return PLAIN;
    PyObject *place = PyDict_GetItemWithError(site->its.scratch, call->stream_key); /* address, bytes, acquire, release */
    if (!place) return PyErr_Occurred() ? FAILED : OTHERS;
    Py_INCREF(place);
    Verdict verdict = told(PyObject_CallNoArgs(PyTuple_GetItem(place, 2)), PLAIN);
    if (verdict != PLAIN) {
        Py_DECREF(place);
        return verdict;
    }
    call->place = place; /* from here on its lock is this call's */
    place = PyDict_GetItemWithError(site->its.scratch, call->stream_key); /* it may have grown meanwhile: its lock stays */
    if (!place) return PyErr_Occurred() ? FAILED : OTHERS;
    uint64_t address = PyLong_AsUnsignedLongLong(PyTuple_GetItem(place, 0));
    uint64_t nbytes = PyLong_AsUnsignedLongLong(PyTuple_GetItem(place, 1));
    if (PyErr_Occurred()) return FAILED;
    if (nbytes < site->scratch_bytes) return OTHERS;
    for (size_t n = 0; n < site->piece_count; n++)
        call->launch.memory[site->inputs + site->outputs + n] = address + site->pieces[n];
    return PLAIN;
}

static int let_go(Call *call) { /* of the scratch */
    if (!call->place) return 0;
    PyObject *type, *value, *trace, *place = call->place;
    call->place = NULL;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *released = PyObject_CallNoArgs(PyTuple_GetItem(place, 3));
    Py_XDECREF(released);
    Py_DECREF(place);
    if (type) {
        PyErr_Clear();
        PyErr_Restore(type, value, trace);
    }
    return released ? 0 : -1;
}

/* The broker may read what was launched last when this process dies of it. */
static void note(const Call *call) {
    uint32_t *words = (uint32_t *)(call->site->order + (uint64_t)call->timeline * TIMELINE_BYTES + LIFTED_COUNT);
    uint32_t count = words[0];
    __atomic_store_n(words + (LIFTED_LAST - LIFTED_COUNT) / 4 + count % KEPT, (uint32_t)call->site->number, __ATOMIC_RELEASE);
    __atomic_store_n(words, count + 1, __ATOMIC_RELEASE);
}

static Verdict enqueue(LiftedCalls *self, Call *call) {
    const LiftedSite *site = call->site;
    void *context = NULL;
    int error, status = 0, is_plain = 0;
    if (self->is_closed || load32(site->order + LIFT_EPOCH) != (uint32_t)site->epoch) return OTHERS; /* what ran since may be much */
    note(call);
    Py_BEGIN_ALLOW_THREADS
    error = ((int (*)(void **))site->get_current)(&context);
    if (!error && (uint64_t)context == site->context) error = ((int (*)(void *, int *))site->is_capturing)(call->launch.stream, &status);
    is_plain = !error && !status && (uint64_t)context == site->context;
    if (is_plain) error = launch_all(site, &call->launch);
    Py_END_ALLOW_THREADS
    if (!is_plain) return OTHERS;
    if (!error) return PLAIN;
    if (let_go(call) < 0) return FAILED; /* what follows is Python, and anything */
    PyObject *raised = PyObject_CallMethod(self->its.lifts, "fail", "Oii", site->its.site, error, call->launch.step);
    if (raised) {
        Py_DECREF(raised);
        PyErr_SetString(PyExc_SystemError, "an error of the driver was not raised");
    }
    return FAILED;
}

/* What a report will be made of: ipc's Record (client/connection/record.py). */
static Verdict finish(const LiftedCalls *self, const Call *call) {
    const LiftedSiteFields *its = &call->site->its;
    uint64_t now_ns = clock_ns();
    count_call(call->site->row, call->start_ns, now_ns, 0);
    PyObject *end_ns = PyLong_FromUnsignedLongLong(now_ns);
    PyObject *record = end_ns ? PyTuple_Pack(9, its->plan, nothing, call->start_ns, end_ns, zero, nothing,
                                             its->decision, nothing, its->note)
                              : NULL;
    int is_noted = record && PyObject_SetAttr(self->its.last, s_record, record) == 0;
    Py_XDECREF(end_ns);
    Py_XDECREF(record);
    if (!is_noted || !call->site->is_ahead) return is_noted ? PLAIN : FAILED;
    call->site->is_ahead = 0;
    return told(PyObject_CallMethodObjArgs(self->its.lifts, s_arrive, its->site, NULL), PLAIN);
}

static PyObject *LiftedCalls_run(LiftedCalls *self, PyObject *const *given, Py_ssize_t count) {
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "run(request, start_ns)");
        return NULL;
    }
    Call call;
    Key key;
    memset(&call, 0, offsetof(Call, launch));
    call.request = given[0], call.start_ns = given[1];
    key.is_placed = key.count = 0, key.used = 0;
    Verdict verdict = PyDict_Size(self->its.known) && !self->is_closed ? find(self, &call, &key) : UNKNOWN;
    if (verdict == PLAIN) verdict = find_stream(self, &call);
    if (verdict == PLAIN) verdict = find_memory(self, &call, &key);
    if (verdict == PLAIN) {
        verdict = find_scratch(&call);
        if (verdict == PLAIN) verdict = enqueue(self, &call);
        if (let_go(&call) < 0) verdict = FAILED;
    }
    if (verdict == PLAIN) verdict = finish(self, &call);
    PyObject *result = verdict == PLAIN ? call.result : NULL;
    Py_XINCREF(result);
    drop(&call);
    if (verdict == OTHERS) result = PyObject_CallMethodObjArgs(self->its.lifts, s_run_otherwise, given[0], given[1], NULL);
    if (verdict == UNKNOWN) result = PyObject_CallFunctionObjArgs(self->its.next, given[0], given[1], NULL);
    return result;
}

/* By which a call is known here; None for one that this file leaves to the Python. */
static PyObject *LiftedCalls_key(LiftedCalls *self, PyObject *request) {
    Parts parts = {0};
    Key key;
    key.is_placed = key.count = 0, key.used = 0;
    Verdict verdict = write_key(&self->its.types, request, &parts, &key);
    drop_parts(&parts);
    if (verdict == FAILED) return NULL;
    if (verdict == PLAIN) return PyBytes_FromStringAndSize(key.bytes, key.used);
    Py_RETURN_NONE;
}

static PyObject *LiftedCalls_learn(LiftedCalls *self, PyObject *args, PyObject *kwargs) {
    (void)args;
    return learn_all(kwargs, lifts_names, LIFTS_FIELDS, self->its.of);
}

/* Nothing is launched any more: the page goes. */
static PyObject *LiftedCalls_close(LiftedCalls *self, PyObject *ignored) {
    (void)ignored;
    self->is_closed = 1;
    Py_RETURN_NONE;
}

static PyMethodDef lifts_methods[] = {
    {"run", (PyCFunction)(void (*)(void))LiftedCalls_run, METH_FASTCALL, "run(request, start_ns): the result, or what `next` has"},
    {"key", (PyCFunction)LiftedCalls_key, METH_O, "key(request): bytes, or None"},
    {"learn", (PyCFunction)(void (*)(void))LiftedCalls_learn, METH_VARARGS | METH_KEYWORDS, "learn(tensor=..., ...)"},
    {"close", (PyCFunction)LiftedCalls_close, METH_NOARGS, "close(): launch nothing any more"},
    {NULL, NULL, 0, NULL},
};

SLOTS_OF("_lifted", LiftedCalls, {Py_tp_methods, lifts_methods},)
SLOTS_OF("_lifted", LiftedSite, )

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_lifted", "Lifted calls on a GPU that are made again.", -1, NULL};

static PyObject *numbers(const int *of, int count) {
    PyObject *made = PyTuple_New(count);
    for (int n = 0; made && n < count; n++) {
        PyObject *number = PyLong_FromLong(of[n]);
        if (!number || PyTuple_SetItem(made, n, number) < 0) Py_CLEAR(made);
    }
    return made;
}

PyMODINIT_FUNC PyInit__lifted(void) {
    static const int page[] = {TIMELINES, TIMELINE_BYTES, FAILURE, LIFTED_COUNT, LIFTED_LAST, KEPT, LIFT_EPOCH, COUNTER_LAYOUT};
    static const int program[] = {KERNEL, FILL, COPY, MAX_PARAMETERS, MAX_PARAMETER_BYTES, MAX_TENSORS, MAX_MEMORY,
                                  sizeof(Head), sizeof(KernelStep), sizeof(Attribute), sizeof(Patch), sizeof(FillStep),
                                  sizeof(CopyStep), sizeof(Config), offsetof(Config, stream), offsetof(Config, attributes),
                                  1, 2, 4, 8, 16, 256};
    static const int limits[] = {READ_EVERY, PER_THREAD};
    PyObject *made = PyModule_Create(&module);
    if (!made) return NULL;
    KEY_NAMES(INTERN)
    NAMES(INTERN)
    if (!(nothing = PyTuple_New(0)) || !(zero = PyLong_FromLong(0))) return NULL;
    PyObject *layout = numbers(page, sizeof page / sizeof *page), *steps = numbers(program, sizeof program / sizeof *program);
    PyObject *told_limits = numbers(limits, sizeof limits / sizeof *limits);
    PyObject *calls = PyType_FromSpec(&LiftedCalls_spec), *site = PyType_FromSpec(&LiftedSite_spec);
    if (!layout || !steps || !told_limits || !calls || !site || PyModule_AddObjectRef(made, "LAYOUT", layout) < 0 ||
        PyModule_AddObjectRef(made, "PROGRAM", steps) < 0 || PyModule_AddObjectRef(made, "LIMITS", told_limits) < 0 ||
        PyModule_AddObjectRef(made, "LiftedCalls", calls) < 0 || PyModule_AddObjectRef(made, "LiftedSite", site) < 0)
        Py_CLEAR(made);
    Py_XDECREF(layout);
    Py_XDECREF(steps);
    Py_XDECREF(told_limits);
    Py_XDECREF(calls);
    Py_XDECREF(site);
    return made;
}
