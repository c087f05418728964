/* Calls on the CPU that are made again, in C: the way of Session.run over an express lane, for the plain case.

   Whatever is not plain is left to the Python, before the call is on the lane: `miss`. A call that is on the lane is a Receipt; one
   that does not end well there, or not soon, ends in Python, too: Session.resume. What comes off the page is the worker's: each word
   is read once, and checked before it is used. Layouts are those of ipc/shm/lane.py and ipc/transport/wire.py: LAYOUT lets Python
   compare them. The interpreter's lock guards a lane's calls; it is let go of while the worker works, and to ring. */

#define PACKAGE "layerzero.client.session."
#define APPEND_ARRAY append_ndarray
#define _GNU_SOURCE /* POLLRDHUP */
#include "../gpu/_call_key.h"
#include "../gpu/_counting.h"
#include "_blocks.h"
#include "_waiting.h"
#include "_line.h"

#include <stdlib.h>

enum { REF_BYTES = 24 };                               /* ipc/transport/wire.py */
enum { NOTHING, PLACED, COPIED };                      /* how an input crosses; the last two are what its key says of it, too */
enum { FRESH = 2 };
enum { LONG_COPY_BYTES = 256 << 10, MAX_COPIED_BYTES = 8 << 20 }; /* of an input; of a call: of more, the longer way does not matter */
static const uint64_t NO_ARENA = 0xFFFFFFFF;
static const uint64_t HELD_NS = 15000; /* so long may the interpreter's lock be held for a call that is usually over by then */

/* --- what is known, in tables as in ../gpu/_fastpath.c */

#define REPEATS(X) X(known) X(session) X(last) X(pool) X(arenas) X(slabs) X(kept) X(miss)
#define SITE(X) X(lane) X(line) X(link) X(lease) X(route) X(plan) X(decision) X(copies) X(note) X(wrap) X(values) X(inputs)
#define NAMES(X) X(lease) X(needs_digest) X(here) X(stays_out) X(lost) X(index) X(record) X(resume) \
    X(row) X(memory) X(told) X(entries) X(look)

NAMES(NAME)
#include "_arenas.h"
#include "_kept.h"
#include "_lending.h"

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
    Arenas arenas;
    uint64_t spin_ns; /* at most */
    Cores cores; /* its count follows spin_ns, as in repeats_numbers */
} Repeats;

typedef union {
    struct { SITE(FIELD) };
    PyObject *of[SITE_FIELDS];
} CallSiteFields;
typedef struct {
    PyObject_HEAD
    CallSiteFields its;
    uint64_t epoch, number, timeout_ns, result, result_bytes, copied_bytes, row; /* row: in the page of counters */
    Watch watch;
} CallSite;
static const char *const site_numbers[] = {"epoch", "number", "timeout_ns", "result", "result_bytes", "copied_bytes", "row"};
enum { SITE_NUMBERS = sizeof site_numbers / sizeof *site_numbers };
static const char *const repeats_numbers[] = {"spin_ns", "cores"};

static PyMemberDef site_members[] = {
    {"lane", T_OBJECT, offsetof(CallSite, its) + offsetof(CallSiteFields, lane), READONLY, NULL},
    {"lease", T_OBJECT, offsetof(CallSite, its) + offsetof(CallSiteFields, lease), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyObject *Repeats_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    Repeats *self = (Repeats *)make(type);
    (void)args;
    if (!self) return NULL;
    if (!kwargs) PyErr_SetString(PyExc_TypeError, "keyword arguments are needed");
    if (!kwargs || take_all(kwargs, repeats_names, REPEATS_FIELDS, self->its.of) < 0 ||
        take_numbers(kwargs, repeats_numbers, 2, &self->spin_ns) < 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static PyObject *CallSite_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    CallSite *self = (CallSite *)make(type);
    (void)args;
    if (!self) return NULL;
    if (!kwargs) PyErr_SetString(PyExc_TypeError, "keyword arguments are needed");
    if (!kwargs || take_all(kwargs, site_names, SITE_FIELDS, self->its.of) < 0 ||
        take_numbers(kwargs, site_numbers, SITE_NUMBERS, &self->epoch) < 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

LIFE(CallSite, SITE_FIELDS)
#define Repeats_dealloc Repeats_free /* as LIFE has it; there is more to be freed */
LIFE(Repeats, REPEATS_FIELDS)
#undef Repeats_dealloc
static void Repeats_dealloc(Repeats *self) {
    forget_arenas(&self->arenas);
    Repeats_free(self);
}

/* One call on its way. All but `request`, `start_ns` and `args` are its own references. */
typedef struct {
    Parts parts;
    PyObject *request, *start_ns, *key;
    CallSite *site;
    Receipt *receipt;
    int count;
    uint64_t addresses[KEY_ADDRESSES];
    Arena places[KEY_ADDRESSES]; /* the arena that each lies in; of address 0 for none */
} Call;

static void drop(Call *call) {
    PyObject *mine[] = {call->key, (PyObject *)call->site, (PyObject *)call->receipt};
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

/* The key, with whether each array lies in an arena. */
static Verdict identify(Repeats *self, Call *call) {
    Key key;
    key.is_placed = 0, key.count = 0, key.used = 0;
    Verdict verdict = write_key(&self->its.types, call->request, &call->parts, &key);
    if (verdict == PLAIN) verdict = see_arenas(&self->arenas, self->its.pool, self->its.arenas);
    call->count = key.count;
    for (int n = 0; verdict == PLAIN && n < key.count; n++) {
        call->addresses[n] = key.addresses[n], call->places[n] = arena_of(&self->arenas, key.addresses[n]);
        char placing = call->places[n].address ? PLACED : COPIED;
        verdict = append(&key, &placing, 1);
    }
    if (verdict != PLAIN) return verdict;
    call->key = PyBytes_FromStringAndSize(key.bytes, (Py_ssize_t)key.used);
    return call->key ? PLAIN : FAILED;
}

/* Whether its route has the lease that the site is of. */
static Verdict is_current(Repeats *self, Call *call) {
    const CallSiteFields *its = &call->site->its;
    PyObject *lease = PyObject_GetAttr(its->route, s_lease);
    int needs_digest = has(its->route, s_needs_digest), is_elsewhere = is_none(its->route, s_here);
    int is_its = lease == its->lease && !needs_digest && is_elsewhere;
    Py_XDECREF(lease);
    if (PyErr_Occurred()) return FAILED;
    if (!is_its && PyDict_DelItem(self->its.known, call->key) < 0) PyErr_Clear(); /* another thread did */
    return is_its ? PLAIN : OTHERS;
}

static Verdict find(Repeats *self, Call *call) {
    Verdict verdict = identify(self, call);
    if (verdict != PLAIN) return verdict;
    call->site = (CallSite *)PyDict_GetItemWithError(self->its.known, call->key);
    if (!call->site) return PyErr_Occurred() ? FAILED : UNKNOWN;
    Py_INCREF((PyObject *)call->site);
    return is_current(self, call);
}

/* --- its references, and inputs that are copied */

/* Memory for `nbytes`, in an arena that the worker can be told of. */
static Verdict take_memory(Repeats *self, uint64_t nbytes, PyObject **kept, Ref *ref, char **at) {
    Block *block = take_block((Slabs *)self->its.slabs, nbytes);
    if (!block) return FAILED;
    *kept = (PyObject *)block, *at = block->slot.at;
    if (see_arenas(&self->arenas, self->its.pool, self->its.arenas) != PLAIN) return FAILED; /* it may be in one that is new */
    Arena arena = arena_of(&self->arenas, (uint64_t)*at);
    if (!fits(arena, (uint64_t)*at, nbytes)) return OTHERS;
    *ref = ref_in(arena, (uint64_t)*at, nbytes);
    return PLAIN;
}

/* Others may run Python meanwhile, where that takes long. */
static void copy_bytes(char *to, const void *from, uint64_t nbytes) {
    if (nbytes < LONG_COPY_BYTES) {
        memcpy(to, from, nbytes);
        return;
    }
    Py_BEGIN_ALLOW_THREADS
    memcpy(to, from, nbytes);
    Py_END_ALLOW_THREADS
}

static uint64_t aligned(uint64_t nbytes) { return (nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

/* Copies of inputs that were made before and hold, by input, 0 for none; and how many bytes are to be copied now. */
static Verdict find_copies(Repeats *self, Call *call, const uint64_t *inputs, int count, uint64_t *copies, uint64_t *nbytes) {
    Receipt *receipt = call->receipt;
    memset(copies, 0, (size_t)count * sizeof *copies), *nbytes = 0;
    if (call->site->copied_bytes >= KEPT_LEAST_BYTES && !(receipt->its.kept = PyList_New(0))) return FAILED;
    for (int n = 0; n < count; n++) {
        if (inputs[2 * n] != COPIED) continue;
        uint64_t size = inputs[2 * n + 1];
        if (receipt->its.kept) {
            PyObject *memory, *told;
            int before = find_copy(self->its.kept, PyTuple_GetItem(call->parts.args, n), call->addresses[n], size, &copies[n], &memory, &told);
            int status = before < 0 ? -1 : PyList_Append(receipt->its.kept, told ? told : Py_None);
            if (status == 0) status = PyList_Append(receipt->its.kept, before ? Py_True : Py_False);
            if (status == 0) status = PyList_Append(receipt->its.kept, memory ? memory : Py_None);
            Py_XDECREF(memory);
            Py_XDECREF(told);
            if (status < 0) return leave();
        }
        if (!copies[n]) *nbytes += aligned(size);
    }
    return *nbytes > MAX_COPIED_BYTES ? OTHERS : see_arenas(&self->arenas, self->its.pool, self->its.arenas);
}

/* References of everything, and inputs that lie in no arena into a block of their own. */
static Verdict write_call(Repeats *self, Call *call, char *body, uint64_t *nbytes) {
    CallSite *site = call->site;
    Receipt *receipt = call->receipt;
    const uint64_t *inputs; /* pairs: how it crosses, bytes */
    char *inputs_bytes, *values, *copies = NULL, *result;
    Py_ssize_t inputs_size, values_size;
    if (PyBytes_AsStringAndSize(site->its.inputs, &inputs_bytes, &inputs_size) < 0 ||
        PyBytes_AsStringAndSize(site->its.values, &values, &values_size) < 0)
        return FAILED;
    inputs = (const uint64_t *)inputs_bytes;
    int count = (int)(inputs_size / 16);
    if (count + 1 != call->count) return OTHERS; /* the last address is that of `out` */
    Ref refs[KEY_ADDRESSES + 1], copied = {0, 0, 0, 0};
    uint64_t out = call->addresses[count], used = 0, copied_bytes, kept[KEY_ADDRESSES];
    int found = count;
    Verdict verdict = find_copies(self, call, inputs, count, kept, &copied_bytes);
    if (verdict == PLAIN && copied_bytes) verdict = take_memory(self, copied_bytes, &receipt->its.inputs, &copied, &copies);
    if (verdict != PLAIN) return verdict;
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
        } else if (kept[n]) {
            Arena arena = arena_of(&self->arenas, kept[n]);
            if (!fits(arena, kept[n], size)) return OTHERS; /* the broker does not know it yet */
            refs[n] = ref_in(arena, kept[n], size);
        } else {
            if (used > copied_bytes || size > copied_bytes - used) return OTHERS;
            copy_bytes(copies + used, (const void *)address, size);
            refs[n] = (Ref){copied.arena, 0, copied.offset + used, size};
            receipt->copied_bytes += size;
            used += aligned(size);
        }
    }
    if (site->result == PLACED) {
        if (!out || !fits(call->places[count], out, site->result_bytes)) return OTHERS;
        refs[found++] = ref_in(call->places[count], out, site->result_bytes);
    } else if (site->result == FRESH) {
        verdict = take_memory(self, site->result_bytes, &receipt->its.block, &refs[found++], &result);
        if (verdict != PLAIN) return verdict;
    }
    *nbytes = (uint64_t)found * REF_BYTES + (uint64_t)values_size;
    if (*nbytes > MAX_CALL_BYTES) return OTHERS;
    memcpy(body, refs, (size_t)found * REF_BYTES);
    memcpy(body + (size_t)found * REF_BYTES, values, (size_t)values_size);
    return PLAIN;
}

/* --- the wait */

/* --- the call on the lane */

static Verdict carry(Repeats *self, Call *call) {
    CallSite *site = call->site;
    Line *line = (Line *)site->its.line;
    uint64_t page = line->bells.page, nbytes = 0;
    char body[MAX_CALL_BYTES];
    int is_linked = is_none(site->its.link, s_lost);
    if (is_linked <= 0) return is_linked < 0 ? FAILED : OTHERS;
    Receipt *receipt = call->receipt = (Receipt *)make(receipt_type);
    if (!receipt) return FAILED;
    PyObject *kept[] = {(PyObject *)site, call->request, call->start_ns, call->key, call->parts.args, call->parts.out};
    for (size_t n = 0; n < sizeof kept / sizeof *kept; n++) Py_INCREF(kept[n]);
    receipt->its.site = kept[0], receipt->its.request = kept[1], receipt->its.start_ns = kept[2];
    receipt->its.key = kept[3], receipt->its.args = kept[4], receipt->its.out = kept[5];
    receipt->row = site->row;
    Verdict verdict = write_call(self, call, body, &nbytes);
    if (verdict == PLAIN && site->copied_bytes >= LONG_COPY_BYTES) { /* others may have run meanwhile */
        verdict = is_current(self, call);
        is_linked = is_none(site->its.link, s_lost);
        if (verdict == PLAIN && is_linked <= 0) verdict = is_linked < 0 ? FAILED : OTHERS;
    }
    if (verdict != PLAIN) return verdict;
    if (load64(page + EPOCH) != site->epoch) return OTHERS;
    return put(line, receipt, site->number, body, nbytes, site->timeout_ns) ? PLAIN : OTHERS;
}

/* Until the receipt's call is over, or it is `due`, or somebody must look. `rings`: that the worker has not been told of yet. */
static void wait_long(Repeats *self, Receipt *receipt, Watch *watch, uint64_t rings, uint64_t expected_ns, uint64_t due) {
    Line *line = (Line *)receipt->its.line;
    uint64_t spin_ns = wanted_ns(watch, &self->cores, self->spin_ns), seen_ns;
    if (spin_ns && expected_ns < HELD_NS && watch->usual_ns && watch->usual_ns < HELD_NS && !watch->missed) { /* to pass the lock on would take longer */
        if (rings) ring(line->bells.doorbell, rings);
        rings = 0;
        if ((seen_ns = glance(line->bells.page, receipt->call, HELD_NS))) {
            note_watch(watch, seen_ns);
            return;
        }
    }
    owe(&line->bells, rings);
    Py_BEGIN_ALLOW_THREADS
    if (rings) pay(&line->bells, rings);
    if (spin_ns && expected_ns > EARLY_NS + LEAST_SLEEP_NS) sleep_before(&line->bells, expected_ns, due);
    seen_ns = wait_for(&line->bells, receipt->call, spin_ns, due);
    Py_END_ALLOW_THREADS
    if (spin_ns && seen_ns != NOT_WATCHED) note_watch(watch, seen_ns);
}

/* The copies of a call, for its report. Where some may have been made before: with what was told of each, and whether it was. The
   memory of those is let go of. */
static PyObject *copies_of(Receipt *receipt) {
    PyObject *copies = ((CallSite *)receipt->its.site)->its.copies, *kept = receipt->its.kept;
    if (!kept) {
        Py_INCREF(copies);
        return copies;
    }
    for (Py_ssize_t n = 2; n < PyList_Size(kept); n += 3) {
        Py_INCREF(Py_None);
        if (PyList_SetItem(kept, n, Py_None) < 0) return NULL;
    }
    return PyTuple_Pack(2, copies, kept);
}

/* What the caller gets, and what its report will be made of. */
static PyObject *finish(Repeats *self, Receipt *receipt) {
    const CallSite *site = (CallSite *)receipt->its.site;
    const CallSiteFields *its = &site->its;
    uint64_t end_ns = clock_ns();
    count_receipt(receipt, end_ns);
    PyObject *result = site->result == PLACED ? receipt->its.out : Py_None, *note = NULL, *record = NULL, *copies = NULL;
    if (receipt->its.block)
        result = PyObject_CallFunctionObjArgs(its->wrap, receipt->its.block, NULL);
    else
        Py_INCREF(result);
    if (!result) return NULL;
    if (PyObject_IsTrue(its->note)) Py_INCREF(note = its->note);
    else note = PyObject_GetAttr(its->route, s_stays_out);
    if (note && (copies = copies_of(receipt)))
        record = Py_BuildValue("(OOOKK()O()O)", its->plan, copies, receipt->its.start_ns, (unsigned long long)end_ns,
                               (unsigned long long)receipt->kernel_ns, its->decision, note);
    if (!record || PyObject_SetAttr(self->its.last, s_record, record) < 0) Py_CLEAR(result);
    Py_XDECREF(record);
    Py_XDECREF(copies);
    Py_XDECREF(note);
    return result;
}

/* The result of a call that has ended well; else somebody in Python finds out what became of it, and may be interrupted. */
static PyObject *settle(Repeats *self, Receipt *receipt) {
    if (read_end(receipt) > 0 && receipt->status == OK) return finish(self, receipt);
    return PyObject_CallMethodObjArgs(self->its.session, s_resume, (PyObject *)receipt, NULL);
}

static PyObject *missed(Repeats *self) {
    Py_INCREF(self->its.miss);
    return self->its.miss;
}

/* Onto its lane, if it may: PLAIN. */
static Verdict begin(Repeats *self, Call *call) {
    Verdict verdict = PyDict_Size(self->its.known) ? find(self, call) : UNKNOWN;
    return verdict == PLAIN ? carry(self, call) : verdict;
}

static PyObject *Repeats_run(Repeats *self, PyObject *const *given, Py_ssize_t count) {
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "run(request, start_ns)");
        return NULL;
    }
    Call call = {.request = given[0], .start_ns = given[1]};
    PyObject *result = NULL;
    Verdict verdict = begin(self, &call);
    if (verdict == PLAIN) {
        wait_long(self, call.receipt, &call.site->watch, 1, 0, call.receipt->due_ns);
        result = settle(self, call.receipt);
    } else if (verdict != FAILED) {
        result = missed(self);
    }
    drop(&call);
    return result;
}

static PyObject *Repeats_submit(Repeats *self, PyObject *const *given, Py_ssize_t count) {
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "submit(request, start_ns)");
        return NULL;
    }
    Call call = {.request = given[0], .start_ns = given[1]};
    PyObject *result = NULL;
    Verdict verdict = begin(self, &call);
    if (verdict == PLAIN) {
        Line *line = (Line *)call.receipt->its.line;
        owe(&line->bells, 1);
        Py_BEGIN_ALLOW_THREADS
        pay(&line->bells, 1);
        Py_END_ALLOW_THREADS
        Py_INCREF((PyObject *)call.receipt);
        result = (PyObject *)call.receipt;
    } else if (verdict != FAILED) {
        result = missed(self);
    }
    drop(&call);
    return result;
}

static Receipt *receipt_of(PyObject *given) {
    if (Py_TYPE(given) == receipt_type) return (Receipt *)given;
    PyErr_SetString(PyExc_TypeError, "a receipt is needed");
    return NULL;
}

/* The result of a submitted call; `miss` where it has not ended well, or not in that time, or somebody must look. */
static PyObject *Repeats_take(Repeats *self, PyObject *const *given, Py_ssize_t count) {
    Receipt *receipt = count == 2 ? receipt_of(given[0]) : NULL;
    double left_s = receipt ? PyFloat_AsDouble(given[1]) : -1;
    if (!receipt && !PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "take(receipt, left_s)");
    if (PyErr_Occurred()) return NULL;
    int has_ended = read_end(receipt);
    if (!has_ended && left_s > 0 && !((Line *)receipt->its.line)->bells.is_closed) {
        uint64_t now = clock_ns(), due = left_s < 1e9 ? now + (uint64_t)(left_s * 1e9) : receipt->due_ns;
        wait_long(self, receipt, &((Line *)receipt->its.line)->watch, 0, 0, due < receipt->due_ns ? due : receipt->due_ns);
        has_ended = read_end(receipt);
    }
    return has_ended > 0 && receipt->status == OK && receipt->its.site ? finish(self, receipt) : missed(self);
}

/* As `take`, of any call: without its result. `expected_ns`: what the worker took for it before. */
static PyObject *Repeats_await(Repeats *self, PyObject *args) {
    PyObject *given;
    double left_s;
    unsigned long long expected_ns;
    if (!PyArg_ParseTuple(args, "OdK", &given, &left_s, &expected_ns)) return NULL;
    Receipt *receipt = receipt_of(given);
    if (!receipt) return NULL;
    Line *line = (Line *)receipt->its.line;
    if (!receipt->has_ended && left_s > 0 && !line->bells.is_closed)
        wait_long(self, receipt, &line->watch, 0, expected_ns, clock_ns() + (uint64_t)((left_s < 1e9 ? left_s : 1e9) * 1e9));
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

/* Where arrays lie, 8 bytes for each of a tuple, 0 for None; None where the Python knows more of one of them. */
static PyObject *Repeats_addresses(Repeats *self, PyObject *given) {
    Key key;
    Verdict verdict = PyTuple_CheckExact(given) ? PLAIN : OTHERS;
    key.is_placed = 0, key.count = 0;
    for (Py_ssize_t n = 0; verdict == PLAIN && n < PyTuple_Size(given); n++) {
        key.used = 0;
        verdict = append_argument(&self->its.types, &key, PyTuple_GetItem(given, n));
    }
    if (verdict == FAILED) return NULL;
    if (verdict == PLAIN) return PyBytes_FromStringAndSize((const char *)key.addresses, 8 * (Py_ssize_t)key.count);
    Py_RETURN_NONE;
}

/* Arguments of a function, of which nothing has to be copied, as they cross: (tree, references, how many, bytes that are lent); None for
   all others. */
static PyObject *Repeats_lend(Repeats *self, PyObject *args) {
    Tree tree;
    Range ranges[MAX_LENT];
    Ref refs[MAX_LENT];
    int count = 0;
    uint64_t nbytes = 0;
    tree.used = 0;
    if (!PyTuple_CheckExact(args)) return PyErr_Format(PyExc_TypeError, "a tuple is needed");
    Verdict verdict = see_arenas(&self->arenas, self->its.pool, self->its.arenas);
    if (verdict == PLAIN) verdict = pack_arguments(&self->its.types, &self->arenas, args, &tree, ranges, &count, &nbytes);
    if (verdict == FAILED) return NULL;
    if (verdict != PLAIN) Py_RETURN_NONE;
    for (int n = 0; n < count; n++) {
        uint64_t start = start_of(&ranges[n]), address = ranges[n].arena.address + start;
        refs[n] = ref_in(ranges[n].arena, address, ranges[n].high - address);
    }
    return Py_BuildValue("(y#y#iK)", tree.bytes, (Py_ssize_t)tree.used, (const char *)refs, (Py_ssize_t)(count * REF_BYTES), count,
                         (unsigned long long)nbytes);
}

static PyObject *Repeats_learn(Repeats *self, PyObject *args, PyObject *kwargs) {
    (void)args;
    return learn_all(kwargs, repeats_names, REPEATS_FIELDS, self->its.of);
}

static PyObject *Repeats_forget_arenas(Repeats *self, PyObject *unused) {
    (void)unused;
    forget_arenas(&self->arenas);
    Py_RETURN_NONE;
}

static PyMethodDef repeats_methods[] = {
    {"run", (PyCFunction)(void (*)(void))Repeats_run, METH_FASTCALL, "run(request, start_ns): the result, or `miss`"},
    {"submit", (PyCFunction)(void (*)(void))Repeats_submit, METH_FASTCALL, "submit(request, start_ns): a receipt, or `miss`"},
    {"take", (PyCFunction)(void (*)(void))Repeats_take, METH_FASTCALL, "take(receipt, left_s): the result, or `miss`"},
    {"wait", (PyCFunction)Repeats_await, METH_VARARGS, "wait(receipt, left_s, expected_ns)"},
    {"key", (PyCFunction)Repeats_key, METH_O, "key(request): bytes, or None"},
    {"addresses", (PyCFunction)Repeats_addresses, METH_O, "addresses(arrays): of each in a tuple, as bytes, or None"},
    {"lend", (PyCFunction)Repeats_lend, METH_O, "lend(args): (tree, references, their number, bytes), or None"},
    {"learn", (PyCFunction)(void (*)(void))Repeats_learn, METH_VARARGS | METH_KEYWORDS, "learn(tensor=..., ...)"},
    {"forget_arenas", (PyCFunction)Repeats_forget_arenas, METH_NOARGS, "forget_arenas(): they have other numbers"},
    {NULL, NULL, 0, NULL},
};

SLOTS_OF("_repeats", Repeats, {Py_tp_methods, repeats_methods},)
SLOTS_OF("_repeats", CallSite, {Py_tp_members, site_members},)

static PyMethodDef functions[] = {
    {"count", count_these, METH_VARARGS, "count(row, ns, copied_bytes, times)"},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_repeats", "Calls on the CPU that are made again.", -1, functions};

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
    PyObject *layout = Py_BuildValue("(iiiiiiiiiiiiiiiiiiiiKiiiiiiiiiii)", LANE_LAYOUT, REF_BYTES, ALIGNMENT,
                                     (unsigned long long)NO_ARENA, COUNTER_LAYOUT, LENDING_LAYOUT);
    if (!layout || PyModule_AddObjectRef(made, "LAYOUT", layout) < 0 || add_type(made, "Slabs", &Slabs_spec, NULL) < 0 ||
        add_type(made, "Block", &Block_spec, &block_type) < 0 || add_type(made, "Repeats", &Repeats_spec, NULL) < 0 ||
        add_type(made, "CallSite", &CallSite_spec, NULL) < 0 || add_type(made, "Line", &Line_spec, &line_type) < 0 ||
        add_type(made, "Receipt", &Receipt_spec, &receipt_type) < 0)
        Py_CLEAR(made);
    Py_XDECREF(layout);
    return made;
}
