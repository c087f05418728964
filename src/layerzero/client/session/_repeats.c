/* Calls on the CPU that are made again, in C: the way of Session.run over an express lane, for the plain case.

   Whatever is not plain is left to the Python, before the call is on the lane: `miss`. A call that is on the lane and does
   not end well there, or not soon, ends in Python, too: Lane.resume, then Session.leave_lane. What comes off the page is the
   worker's: each word is read once, and checked before it is used. Layouts are those of ipc/shm/lane.py and
   ipc/transport/wire.py: LAYOUT lets Python compare them. The interpreter's lock is let go of while the worker works. */

#define PACKAGE "layerzero.client.session."
#define APPEND_ARRAY append_ndarray
#define _GNU_SOURCE /* POLLRDHUP */
#include "../gpu/_call_key.h"
#include "_blocks.h"
#include "_waiting.h"

#include <stdlib.h>
#include <structmember.h>

enum { REF_BYTES = 24 };                               /* ipc/transport/wire.py */
enum { NOTHING, PLACED, COPIED };                      /* how an input crosses; the last two are what its key says of it, too */
enum { FRESH = 2 };
static const uint64_t NO_ARENA = 0xFFFFFFFF, ASK_AGAIN_NS = 10000000;

/* --- what is known, in tables as in ../gpu/_fastpath.c */

#define REPEATS(X) X(known) X(session) X(last) X(pool) X(arenas) X(slabs) X(may_spin) X(ran) X(miss)
#define SITE(X) \
    X(lane) X(link) X(lease) X(route) X(plan) X(decision) X(copies) X(note) X(wrap) X(scratch) X(acquire) X(release) X(values) X(inputs)
#define NAMES(X) \
    X(lease) X(needs_digest) X(here) X(stays_out) X(lost) X(is_closed) X(open_call) X(calls) X(index) X(record) X(resume) X(leave_lane)

NAMES(NAME)
static const char *const repeats_names[] = {REPEATS(TEXT) KEY_TYPES(TEXT)}, *const site_names[] = {SITE(TEXT)};
enum { REPEATS_FIELDS = sizeof repeats_names / sizeof *repeats_names, SITE_FIELDS = sizeof site_names / sizeof *site_names };

typedef struct { uint64_t address, nbytes, number; } Arena; /* number 0: the broker does not know it */

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
    PyObject *index; /* the pool's, of which `table` was made */
    Arena *table;
    Py_ssize_t arenas;
    uint64_t spin_ns; /* at most */
    uint64_t asked_ns;
    int may_spin; /* as of then */
} Repeats;

typedef union {
    struct { SITE(FIELD) };
    PyObject *of[SITE_FIELDS];
} CallSiteFields;
typedef struct {
    PyObject_HEAD
    CallSiteFields its;
    uint64_t page, epoch, number, doorbell, answer, control, timeout_ns, result, result_bytes, scratch_at, scratch_bytes, scratch_arena,
        scratch_offset;
    Watch watch;
} CallSite;
static const char *const site_numbers[] = {"page", "epoch", "number", "doorbell", "answer", "control", "timeout_ns", "result", "result_bytes",
                                           "scratch_at", "scratch_bytes", "scratch_arena", "scratch_offset"};
enum { SITE_NUMBERS = sizeof site_numbers / sizeof *site_numbers };
static const char *const repeats_numbers[] = {"spin_ns"};

/* One lane, for `exchange`. */
typedef struct {
    PyObject_HEAD
    uint64_t page, doorbell, answer, control;
    Watch watch;
} Line;
static const char *const line_numbers[] = {"page", "doorbell", "answer", "control"};
static PyTypeObject *line_type;

static PyObject *Line_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    Line *self = (Line *)make(type);
    (void)args;
    if (!self) return NULL;
    if (!kwargs) PyErr_SetString(PyExc_TypeError, "keyword arguments are needed");
    if (!kwargs || take_numbers(kwargs, line_numbers, 4, &self->page) < 0) Py_CLEAR(self);
    return (PyObject *)self;
}

static void Line_dealloc(Line *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyType_Slot Line_slots[] = {{Py_tp_new, Line_new}, {Py_tp_dealloc, Line_dealloc}, {0, NULL}};
static PyType_Spec Line_spec = {PACKAGE "_repeats.Line", sizeof(Line), 0, Py_TPFLAGS_DEFAULT, Line_slots};

static PyObject *Repeats_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    Repeats *self = (Repeats *)make(type);
    (void)args;
    if (!self) return NULL;
    if (!kwargs) PyErr_SetString(PyExc_TypeError, "keyword arguments are needed");
    if (!kwargs || take_all(kwargs, repeats_names, REPEATS_FIELDS, self->its.of) < 0 ||
        take_numbers(kwargs, repeats_numbers, 1, &self->spin_ns) < 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static PyObject *CallSite_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    CallSite *self = (CallSite *)make(type);
    (void)args;
    if (!self) return NULL;
    if (!kwargs) PyErr_SetString(PyExc_TypeError, "keyword arguments are needed");
    if (!kwargs || take_all(kwargs, site_names, SITE_FIELDS, self->its.of) < 0 ||
        take_numbers(kwargs, site_numbers, SITE_NUMBERS, &self->page) < 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void Repeats_forget(Repeats *self) {
    Py_CLEAR(self->index);
    free(self->table);
    self->table = NULL, self->arenas = 0;
}

LIFE(CallSite, SITE_FIELDS)
#define Repeats_dealloc Repeats_free /* as LIFE has it; there is more to be freed */
LIFE(Repeats, REPEATS_FIELDS)
#undef Repeats_dealloc
static void Repeats_dealloc(Repeats *self) {
    Repeats_forget(self);
    Repeats_free(self);
}

/* One call on its way. All but `request`, `start_ns` and `args` are its own references. */
typedef struct {
    Parts parts;
    PyObject *request, *start_ns, *key, *end;
    CallSite *site;
    Block *block;
    uint64_t kernel_ns;
    int count;
    uint64_t addresses[KEY_ADDRESSES];
    Arena places[KEY_ADDRESSES]; /* the arena that each lies in; of address 0 for none */
} Call;

static void drop(Call *call) {
    PyObject *mine[] = {call->key, call->end, (PyObject *)call->site, (PyObject *)call->block};
    for (size_t n = 0; n < sizeof mine / sizeof *mine; n++) Py_XDECREF(mine[n]);
    drop_parts(&call->parts);
}

/* --- which call it is */

/* Of NumPy: what its buffer tells, byte order and all; of dtypes that have none, the Python knows more. */
static Verdict append_ndarray(const KeyTypes *types, Key *key, PyObject *array) {
    Py_buffer view;
    (void)types;
    if (PyObject_GetBuffer(array, &view, PyBUF_FULL_RO) < 0) return leave();
    struct { char tag, alignment, is_read_only, ndim; uint32_t itemsize; char format[8]; } head;
    memset(&head, 0, sizeof head);
    size_t length = view.format ? strlen(view.format) : sizeof head.format;
    Verdict verdict = length < sizeof head.format && key->count < KEY_ADDRESSES ? PLAIN : OTHERS;
    if (verdict == PLAIN) {
        head.tag = 'N', head.alignment = alignment_class((uint64_t)view.buf), head.is_read_only = (char)view.readonly;
        head.ndim = (char)view.ndim, head.itemsize = (uint32_t)view.itemsize;
        memcpy(head.format, view.format, length);
        key->addresses[key->count++] = (uint64_t)view.buf;
        verdict = append(key, &head, sizeof head);
    }
    if (verdict == PLAIN) verdict = append(key, view.shape, 8 * (size_t)view.ndim);
    if (verdict == PLAIN) verdict = append(key, view.strides, 8 * (size_t)view.ndim);
    PyBuffer_Release(&view);
    return verdict;
}

/* The arenas as they are now, in the order of their addresses. */
static Verdict see_arenas(Repeats *self) {
    PyObject *index = PyObject_GetAttr(self->its.pool, s_index);
    if (!index) return FAILED;
    if (index == self->index) {
        Py_DECREF(index);
        return PLAIN;
    }
    Py_DECREF(index);
    PyObject *found = PyObject_CallNoArgs(self->its.arenas); /* (index, bytes) */
    char *bytes;
    Py_ssize_t nbytes;
    if (!found) return FAILED;
    Arena *table = NULL;
    if (PyTuple_Check(found) && PyTuple_Size(found) == 2 && PyBytes_AsStringAndSize(PyTuple_GetItem(found, 1), &bytes, &nbytes) == 0 &&
        (table = malloc((size_t)nbytes + 1))) {
        memcpy(table, bytes, (size_t)nbytes);
        Repeats_forget(self);
        self->table = table, self->arenas = nbytes / (Py_ssize_t)sizeof *table;
        self->index = PyTuple_GetItem(found, 0);
        Py_INCREF(self->index);
    }
    Py_DECREF(found);
    if (!table && !PyErr_Occurred()) PyErr_NoMemory();
    return table ? PLAIN : FAILED;
}

/* The arena that an address lies in; one of address 0 where there is none. */
static Arena arena_of(const Repeats *self, uint64_t address) {
    Py_ssize_t low = 0, high = self->arenas;
    while (low < high) {
        Py_ssize_t middle = (low + high) / 2;
        if (self->table[middle].address <= address) low = middle + 1;
        else high = middle;
    }
    if (low && address - self->table[low - 1].address < self->table[low - 1].nbytes) return self->table[low - 1];
    return (Arena){0, 0, 0};
}

/* The key, with whether each array lies in an arena. */
static Verdict identify(Repeats *self, Call *call) {
    Key key;
    key.is_placed = 0, key.count = 0, key.used = 0;
    Verdict verdict = write_key(&self->its.types, call->request, &call->parts, &key);
    if (verdict == PLAIN) verdict = see_arenas(self);
    call->count = key.count;
    for (int n = 0; verdict == PLAIN && n < key.count; n++) {
        call->addresses[n] = key.addresses[n], call->places[n] = arena_of(self, key.addresses[n]);
        char placing = call->places[n].address ? PLACED : COPIED;
        verdict = append(&key, &placing, 1);
    }
    if (verdict != PLAIN) return verdict;
    call->key = PyBytes_FromStringAndSize(key.bytes, (Py_ssize_t)key.used);
    return call->key ? PLAIN : FAILED;
}

static Verdict find(Repeats *self, Call *call) {
    Verdict verdict = identify(self, call);
    if (verdict != PLAIN) return verdict;
    call->site = (CallSite *)PyDict_GetItemWithError(self->its.known, call->key);
    if (!call->site) return PyErr_Occurred() ? FAILED : UNKNOWN;
    Py_INCREF((PyObject *)call->site);
    const CallSiteFields *its = &call->site->its;
    PyObject *lease = PyObject_GetAttr(its->route, s_lease);
    int needs_digest = has(its->route, s_needs_digest), is_elsewhere = is_none(its->route, s_here);
    int is_current = lease == its->lease && !needs_digest && is_elsewhere;
    Py_XDECREF(lease);
    if (PyErr_Occurred()) return FAILED;
    if (!is_current && PyDict_DelItem(self->its.known, call->key) < 0) PyErr_Clear(); /* another thread did */
    return is_current ? PLAIN : OTHERS;
}

/* --- its references and inputs, while the lane is its own */

typedef struct { uint32_t arena, unused; uint64_t offset, nbytes; } Ref;
_Static_assert(sizeof(Ref) == REF_BYTES, "as REF of ipc/transport/wire.py");

static Ref ref_in(Arena arena, uint64_t address, uint64_t nbytes) {
    return (Ref){(uint32_t)arena.number, 0, address - arena.address, nbytes};
}

static int fits(Arena arena, uint64_t address, uint64_t nbytes) {
    return arena.number && address - arena.address <= arena.nbytes && nbytes <= arena.nbytes - (address - arena.address);
}

/* References of everything, onto the page; inputs that lie nowhere else into the scratch memory of the lane. */
static Verdict write_call(Repeats *self, Call *call, uint64_t *nbytes) {
    CallSite *site = call->site;
    const uint64_t *inputs; /* pairs: how it crosses, bytes */
    char *inputs_bytes, *values;
    Py_ssize_t inputs_size, values_size;
    if (PyBytes_AsStringAndSize(site->its.inputs, &inputs_bytes, &inputs_size) < 0 ||
        PyBytes_AsStringAndSize(site->its.values, &values, &values_size) < 0)
        return FAILED;
    inputs = (const uint64_t *)inputs_bytes;
    int count = (int)(inputs_size / 16);
    if (count + 1 != call->count) return OTHERS; /* the last address is that of `out` */
    Ref refs[KEY_ADDRESSES];
    uint64_t out = call->addresses[count], used = 0;
    int found = count;
    for (int n = 0; n < count; n++) {
        uint64_t address = call->addresses[n], size = inputs[2 * n + 1];
        if (inputs[2 * n] == NOTHING) {
            refs[n] = (Ref){(uint32_t)NO_ARENA, 0, 0, 0};
            continue;
        }
        if (!address || (site->result == PLACED && address < out + site->result_bytes && out < address + size)) return OTHERS;
        if (inputs[2 * n] == PLACED) {
            if (!fits(call->places[n], address, size)) return OTHERS;
            refs[n] = ref_in(call->places[n], address, size);
        } else {
            if (used > site->scratch_bytes || size > site->scratch_bytes - used) return OTHERS;
            memcpy((char *)site->scratch_at + used, (const void *)address, size);
            refs[n] = (Ref){(uint32_t)site->scratch_arena, 0, site->scratch_offset + used, size};
            used += (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
        }
    }
    if (site->result == PLACED) {
        if (!out || !fits(call->places[count], out, site->result_bytes)) return OTHERS;
        refs[found++] = ref_in(call->places[count], out, site->result_bytes);
    } else if (site->result == FRESH) {
        if (!(call->block = take_block((Slabs *)self->its.slabs, site->result_bytes))) return FAILED;
        if (see_arenas(self) != PLAIN) return FAILED; /* it may be in one that is new */
        uint64_t at = (uint64_t)call->block->slot.at;
        Arena arena = arena_of(self, at);
        if (!fits(arena, at, site->result_bytes)) return OTHERS;
        refs[found++] = ref_in(arena, at, site->result_bytes);
    }
    *nbytes = (uint64_t)found * REF_BYTES + (uint64_t)values_size;
    if (*nbytes > MAX_CALL_BYTES) return OTHERS;
    memcpy((char *)site->page + CALL_BODY, refs, (size_t)found * REF_BYTES);
    memcpy((char *)site->page + CALL_BODY + (size_t)found * REF_BYTES, values, (size_t)values_size);
    return PLAIN;
}

/* --- the wait */

/* How long to watch: not at all while others want the cores. */
static uint64_t spin_of(Repeats *self, Watch *watch) {
    uint64_t wanted = wanted_ns(watch, self->spin_ns);
    if (!wanted) return 0;
    uint64_t now = now_ns();
    if (now - self->asked_ns > ASK_AGAIN_NS) {
        int may_spin = is_true(PyObject_CallNoArgs(self->its.may_spin));
        if (may_spin < 0) PyErr_Clear();
        self->may_spin = may_spin > 0, self->asked_ns = now;
    }
    return self->may_spin ? wanted : 0;
}

/* --- the call on the lane, whose turn it has */

/* Somebody in Python finds out what became of it, and may be interrupted: its memory is kept until that is known. */
static Verdict resume(Repeats *self, Call *call, PyObject *number, uint64_t due_ns) {
    const CallSiteFields *its = &call->site->its;
    PyObject *block = call->block ? (PyObject *)call->block : Py_None;
    PyObject *open = Py_BuildValue("(O(OOOO))", number, call->parts.args, call->parts.out, block, its->scratch);
    int is_held = open && PyObject_SetAttr(its->lane, s_open_call, open) == 0;
    Py_XDECREF(open);
    if (!is_held) return FAILED;
    uint64_t now = now_ns();
    PyObject *left_s = PyFloat_FromDouble(now < due_ns ? (double)(due_ns - now) / 1e9 : 0);
    if (left_s) call->end = PyObject_CallMethodObjArgs(its->lane, s_resume, number, its->lease, left_s, NULL);
    Py_XDECREF(left_s);
    if (!call->end) return FAILED;
    int has_run = PyObject_IsInstance(call->end, self->its.ran);
    if (has_run <= 0) return has_run < 0 ? FAILED : OTHERS;
    call->kernel_ns = PyLong_AsUnsignedLongLong(PyTuple_GetItem(call->end, 1));
    return PyErr_Occurred() ? FAILED : PLAIN;
}

static Verdict carry(Repeats *self, Call *call) {
    CallSite *site = call->site;
    const CallSiteFields *its = &site->its;
    uint64_t page = site->page, nbytes = 0;
    int is_linked = is_none(its->link, s_lost), is_closed = has(its->lane, s_is_closed), is_free = is_none(its->lane, s_open_call);
    if (PyErr_Occurred()) return FAILED;
    if (!is_linked || is_closed || !is_free || load64(page + EPOCH) != site->epoch || load64(page + IS_ENDED)) return OTHERS;
    Verdict verdict = write_call(self, call, &nbytes);
    if (verdict != PLAIN) return verdict;
    uint64_t spin_ns = spin_of(self, &site->watch);
    PyObject *before = PyObject_GetAttr(its->lane, s_calls), *number = NULL;
    uint64_t call_number = before ? PyLong_AsUnsignedLongLong(before) + 1 : 0;
    Py_XDECREF(before);
    if (!PyErr_Occurred()) number = PyLong_FromUnsignedLongLong(call_number);
    if (!number || PyObject_SetAttr(its->lane, s_calls, number) < 0) {
        Py_XDECREF(number);
        return FAILED;
    }
    uint64_t seen_ns;
    uint64_t due_ns = now_ns() + site->timeout_ns;
    Py_BEGIN_ALLOW_THREADS
    put_call(page, (int)site->doorbell, call_number, site->number, nbytes, spin_ns != 0);
    seen_ns = await_end(page, (int)site->answer, (int)site->control, call_number, spin_ns, due_ns);
    Py_END_ALLOW_THREADS
    if (spin_ns) note_watch(&site->watch, seen_ns);
    uint64_t done = load64(page + DONE), status = load64(page + STATUS);
    call->kernel_ns = load64(page + KERNEL_NS);
    if (done != call_number || status != OK || load64(page + WORD_BYTES) > MAX_WORD_BYTES) verdict = resume(self, call, number, due_ns);
    Py_DECREF(number);
    return verdict;
}

/* UNKNOWN: it did not take the lane. OTHERS: it did, and `end` says what it ended in. */
static Verdict carry_alone(Repeats *self, Call *call) {
    PyObject *type, *value, *trace, *released;
    int is_mine = is_true(PyObject_CallFunctionObjArgs(call->site->its.acquire, Py_False, NULL));
    if (is_mine <= 0) return is_mine < 0 ? FAILED : UNKNOWN;
    Verdict verdict = carry(self, call);
    PyErr_Fetch(&type, &value, &trace);
    released = PyObject_CallNoArgs(call->site->its.release);
    Py_XDECREF(released);
    PyErr_Restore(type, value, trace);
    return verdict == OTHERS && !call->end ? UNKNOWN : verdict;
}

/* What the caller gets, and what its report will be made of. */
static PyObject *finish(Repeats *self, Call *call) {
    const CallSiteFields *its = &call->site->its;
    PyObject *result = call->site->result == PLACED ? call->parts.out : Py_None, *note = NULL, *record = NULL;
    if (call->block)
        result = PyObject_CallFunctionObjArgs(its->wrap, call->block, NULL);
    else
        Py_INCREF(result);
    if (!result) return NULL;
    if (PyObject_IsTrue(its->note)) Py_INCREF(note = its->note);
    else note = PyObject_GetAttr(its->route, s_stays_out);
    if (note)
        record = Py_BuildValue("(OOOKK()O()O)", its->plan, its->copies, call->start_ns, (unsigned long long)now_ns(),
                               (unsigned long long)call->kernel_ns, its->decision, note);
    if (!record || PyObject_SetAttr(self->its.last, s_record, record) < 0) Py_CLEAR(result);
    Py_XDECREF(record);
    Py_XDECREF(note);
    return result;
}

/* After a call that did not run on the lane: the next one of its kind is looked at anew, and gets other scratch memory. */
static PyObject *leave_lane(Repeats *self, Call *call) {
    const CallSiteFields *its = &call->site->its;
    if (PyDict_DelItem(self->its.known, call->key) < 0) PyErr_Clear();
    return PyObject_CallMethodObjArgs(self->its.session, s_leave_lane, call->request, call->start_ns, its->lane, its->lease, call->end,
                                      NULL);
}

static PyObject *Repeats_run(Repeats *self, PyObject *const *given, Py_ssize_t count) {
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "run(request, start_ns)");
        return NULL;
    }
    Call call = {.request = given[0], .start_ns = given[1]};
    PyObject *result = NULL;
    Verdict verdict = PyDict_Size(self->its.known) ? find(self, &call) : UNKNOWN;
    if (verdict == OTHERS) verdict = UNKNOWN;
    if (verdict == PLAIN) verdict = carry_alone(self, &call);
    if (verdict == PLAIN) result = finish(self, &call);
    if (verdict == OTHERS) result = leave_lane(self, &call);
    if (verdict == UNKNOWN) {
        result = self->its.miss;
        Py_INCREF(result);
    }
    drop(&call);
    return result;
}

/* A call of which nothing is known here, such as a chain, onto a lane whose turn the caller has; until it is over, or has to be
   looked at. `expected_ns`: what the worker took for it before. */
static PyObject *Repeats_exchange(Repeats *self, PyObject *args) {
    Line *line;
    unsigned long long call, plan, timeout_ns, expected_ns;
    const char *body;
    Py_ssize_t nbytes;
    if (!PyArg_ParseTuple(args, "O!KKy#KK", line_type, &line, &call, &plan, &body, &nbytes, &timeout_ns, &expected_ns)) return NULL;
    if (nbytes > MAX_CALL_BYTES) {
        PyErr_SetString(PyExc_ValueError, "it is too long for a lane");
        return NULL;
    }
    uint64_t page = line->page, spin_ns = spin_of(self, &line->watch), seen_ns;
    Py_BEGIN_ALLOW_THREADS
    memcpy((char *)page + CALL_BODY, body, (size_t)nbytes);
    put_call(page, (int)line->doorbell, call, plan, (uint64_t)nbytes, spin_ns != 0);
    seen_ns = await_expected(page, (int)line->answer, (int)line->control, call, expected_ns, spin_ns, now_ns() + timeout_ns);
    Py_END_ALLOW_THREADS
    if (spin_ns) note_watch(&line->watch, seen_ns);
    Py_RETURN_NONE;
}

/* By which a call is known here, and of each array whether it lies in an arena; None for one that is left to the Python. */
static PyObject *Repeats_key(Repeats *self, PyObject *request) {
    Call call = {.request = request};
    Verdict verdict = identify(self, &call);
    PyObject *key = call.key;
    Py_XINCREF(key);
    drop(&call);
    if (verdict == FAILED) return NULL;
    if (verdict == PLAIN) return key;
    Py_RETURN_NONE;
}

static PyObject *Repeats_learn(Repeats *self, PyObject *args, PyObject *kwargs) {
    (void)args;
    return learn_all(kwargs, repeats_names, REPEATS_FIELDS, self->its.of);
}

static PyObject *Repeats_forget_arenas(Repeats *self, PyObject *unused) {
    (void)unused;
    Repeats_forget(self);
    Py_RETURN_NONE;
}

static PyMethodDef repeats_methods[] = {
    {"run", (PyCFunction)(void (*)(void))Repeats_run, METH_FASTCALL, "run(request, start_ns): the result, or `miss`"},
    {"exchange", (PyCFunction)Repeats_exchange, METH_VARARGS, "exchange(line, call, plan, body, timeout_ns, expected_ns)"},
    {"key", (PyCFunction)Repeats_key, METH_O, "key(request): bytes, or None"},
    {"learn", (PyCFunction)(void (*)(void))Repeats_learn, METH_VARARGS | METH_KEYWORDS, "learn(tensor=..., ...)"},
    {"forget_arenas", (PyCFunction)Repeats_forget_arenas, METH_NOARGS, "forget_arenas(): they have other numbers"},
    {NULL, NULL, 0, NULL},
};

SLOTS_OF("_repeats", Repeats, {Py_tp_methods, repeats_methods},)
SLOTS_OF("_repeats", CallSite, )

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_repeats", "Calls on the CPU that are made again.", -1, NULL};

static int add_type(PyObject *to, const char *name, PyType_Spec *spec, PyTypeObject **kept) {
    PyObject *type = PyType_FromSpec(spec);
    int status = type ? PyModule_AddObjectRef(to, name, type) : -1;
    if (kept && status == 0)
        *kept = (PyTypeObject *)type; /* with its reference */
    else
        Py_XDECREF(type);
    return status;
}

PyMODINIT_FUNC PyInit__repeats(void) {
    PyObject *made = PyModule_Create(&module);
    if (!made) return NULL;
    KEY_NAMES(INTERN)
    NAMES(INTERN)
    PyObject *layout = Py_BuildValue("(iiiiiiiiiiiiiiiiK)", EPOCH, IS_ENDED, CALL, PLAN, CALL_BYTES, WATCHES, CALL_BODY, DONE, STATUS,
                                     KERNEL_NS, WORD_BYTES, MAX_CALL_BYTES, MAX_WORD_BYTES, OK, REF_BYTES, ALIGNMENT,
                                     (unsigned long long)NO_ARENA);
    if (!layout || PyModule_AddObjectRef(made, "LAYOUT", layout) < 0 || add_type(made, "Slabs", &Slabs_spec, NULL) < 0 ||
        add_type(made, "Block", &Block_spec, &block_type) < 0 || add_type(made, "Repeats", &Repeats_spec, NULL) < 0 ||
        add_type(made, "CallSite", &CallSite_spec, NULL) < 0 || add_type(made, "Line", &Line_spec, &line_type) < 0)
        Py_CLEAR(made);
    Py_XDECREF(layout);
    return made;
}
