/* This process's end of a lane, and receipts of the calls that it has put there: Line and Receipt of client/connection/express.py. After
   _waiting.h. The interpreter's lock guards them; it is let go of to ring. */

#include <stddef.h>
#include <structmember.h>

#define RECEIPT(X) X(line) X(site) X(hold) X(request) X(start_ns) X(key) X(args) X(out) X(block) X(inputs) X(kept) X(said)

/* A call on a lane. `said`: behind its end. Of one that is not of a site's, `hold` is what Python keeps for it. */
typedef union {
    struct { RECEIPT(FIELD) };
    PyObject *of[sizeof(struct { RECEIPT(FIELD) }) / sizeof(PyObject *)];
} ReceiptFields;
typedef struct {
    PyObject_HEAD
    ReceiptFields its;
    uint64_t call, due_ns, status, kernel_ns;
    uint64_t row, copied_bytes; /* where it is to be counted, 0 for nowhere, or once it was; with so many bytes */
    int has_ended; /* and that was read, so that its place is free */
    char is_behind; /* others were before it when it was put */
} Receipt;
enum { RECEIPT_FIELDS = sizeof(ReceiptFields) / sizeof(PyObject *) };

/* This process's end of a lane; the bells are its own. `open`: calls whose ends have not been read, by place. */
typedef struct {
    PyObject_HEAD
    PyObject *page; /* keeps it mapped */
    Receipt *open[DEPTH];
    Bells bells;
    uint64_t calls; /* the last one */
    Watch watch;
} Line;
static PyTypeObject *line_type, *receipt_type;

static PyObject *Line_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *page;
    unsigned long long address;
    int doorbell, answer, control;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "OKiii", &page, &address, &doorbell, &answer, &control)) return NULL;
    Line *self = (Line *)make(type);
    if (!self) return NULL;
    Py_INCREF(page);
    self->page = page;
    self->bells.page = address, self->bells.doorbell = doorbell, self->bells.answer = answer, self->bells.control = control;
    pthread_mutex_init(&self->bells.lock, NULL);
    return (PyObject *)self;
}

static int Line_traverse(Line *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->page);
    for (int n = 0; n < DEPTH; n++) Py_VISIT((PyObject *)self->open[n]);
    return 0;
}

static int Line_clear(Line *self) {
    for (int n = 0; n < DEPTH; n++) Py_CLEAR(self->open[n]);
    return 0;
}

static void Line_dealloc(Line *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    Line_clear(self);
    Py_CLEAR(self->page);
    close(self->bells.doorbell);
    close(self->bells.answer);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* Whether a call has ended; -1 when its end makes no sense. What it says is read once, and its place is free then. The caller has a
   reference to it. */
static int read_end(Receipt *receipt) {
    if (receipt->has_ended) return 1;
    Line *line = (Line *)receipt->its.line;
    if (!line) return 0; /* it is being collected */
    uint64_t page = line->bells.page, at = place_of(page, receipt->call);
    End end;
    int has_ended = get_end(page, receipt->call, &end);
    if (has_ended <= 0) return has_ended;
    PyObject *said = end.nbytes ? PyBytes_FromStringAndSize((const char *)at + SAID_AT, (Py_ssize_t)end.nbytes) : NULL;
    if (end.nbytes && !said) {
        PyErr_Clear();
        return 0; /* there may be memory for it later */
    }
    receipt->its.said = said;
    receipt->status = end.status, receipt->kernel_ns = end.kernel_ns, receipt->has_ended = 1;
    Receipt **place = &line->open[(receipt->call - 1) % DEPTH];
    if (*place == receipt) {
        *place = NULL;
        Py_DECREF((PyObject *)receipt);
    }
    return 1;
}

/* Once, of a call that has ended well. */
static void count_receipt(Receipt *receipt, uint64_t end_ns) {
    count_call(receipt->row, receipt->its.start_ns, end_ns, receipt->copied_bytes);
    receipt->row = 0;
}

/* The caller has the only reference to it: nobody will take its result. */
static void count_dropped(Receipt *receipt) {
    if (receipt->row && receipt->status == OK && Py_REFCNT((PyObject *)receipt) == 1) count_receipt(receipt, clock_ns());
}

/* Whether it is on the lane now; its ring is the caller's to make, without the interpreter's lock. 0: there is no room, or the lane is
   closed or has ended. */
static int put(Line *line, Receipt *receipt, uint64_t plan, const char *body, uint64_t nbytes, uint64_t timeout_ns) {
    uint64_t page = line->bells.page, call = line->calls + 1;
    Receipt **place = &line->open[(call - 1) % DEPTH], *before = *place;
    if (line->bells.is_closed || load64(page + IS_ENDED)) return 0;
    Py_XINCREF((PyObject *)before); /* what it leads to goes when the lane is in order again */
    int has_room = !before || read_end(before) > 0;
    if (before && has_room) count_dropped(before);
    if (has_room) {
        Py_INCREF((PyObject *)line);
        Py_INCREF((PyObject *)receipt);
        receipt->its.line = (PyObject *)line, receipt->call = line->calls = call, receipt->due_ns = clock_ns() + timeout_ns;
        receipt->is_behind = load64(page + DONE) + 1 < call;
        *place = receipt;
        put_call(page, call, plan, body, nbytes);
    }
    Py_XDECREF((PyObject *)before);
    return has_room;
}

static PyObject *Line_put(Line *self, PyObject *args) {
    unsigned long long plan, timeout_ns;
    const char *body;
    Py_ssize_t nbytes;
    PyObject *hold;
    if (!PyArg_ParseTuple(args, "Ky#OK", &plan, &body, &nbytes, &hold, &timeout_ns)) return NULL;
    if (nbytes > MAX_CALL_BYTES) Py_RETURN_NONE;
    Receipt *receipt = (Receipt *)make(receipt_type);
    if (!receipt) return NULL;
    Py_INCREF(hold);
    receipt->its.hold = hold;
    if (!put(self, receipt, plan, body, (uint64_t)nbytes, timeout_ns)) {
        Py_DECREF((PyObject *)receipt);
        Py_RETURN_NONE;
    }
    owe(&self->bells, 1);
    Py_BEGIN_ALLOW_THREADS
    pay(&self->bells, 1);
    Py_END_ALLOW_THREADS
    return (PyObject *)receipt;
}

/* Take rings back down to this call's: then the worker cannot claim it, and will decline it. Those behind it are rung for again. Here the
   call has ended; until the worker has declined it, its place has a receipt that keeps no memory. */
static PyObject *Line_withdraw(Line *self, PyObject *given) {
    if (Py_TYPE(given) != receipt_type) return PyErr_Format(PyExc_TypeError, "a receipt is needed");
    Receipt *receipt = (Receipt *)given, **place = &self->open[(receipt->call - 1) % DEPTH];
    uint64_t start_ns = clock_ns();
    int whose = UNKNOWN_YET;
    while (whose == UNKNOWN_YET) {
        if (receipt->has_ended) return PyBool_FromLong(receipt->status == DECLINED);
        Receipt *empty = (Receipt *)make(receipt_type);
        if (!empty) return NULL;
        uint64_t taken;
        whose = take_back(&self->bells, receipt->call, self->calls, &taken);
        if (whose == UNKNOWN_YET && clock_ns() - start_ns > PATIENCE_NS) whose = CLAIMED; /* somebody made the doorbell one that blocks */
        if (whose == TAKEN_BACK) {
            receipt->status = DECLINED, receipt->has_ended = 1;
            Py_INCREF((PyObject *)self);
            empty->its.line = (PyObject *)self, empty->call = receipt->call;
        }
        if (whose == TAKEN_BACK && *place == receipt) { /* the caller has a reference to it, too */
            *place = empty;
            Py_DECREF((PyObject *)receipt);
        } else {
            Py_DECREF((PyObject *)empty);
        }
        if (!taken && whose != UNKNOWN_YET) break;
        Py_BEGIN_ALLOW_THREADS
        if (taken) pay(&self->bells, taken);
        if (whose == UNKNOWN_YET) nanosleep(&(struct timespec){0, 20000}, NULL);
        Py_END_ALLOW_THREADS
    }
    return PyBool_FromLong(whose == TAKEN_BACK);
}

/* For who has no receipt: what an interrupt has taken from him. */
static PyObject *Line_withdraw_held(Line *self, PyObject *hold) {
    for (int n = 0; n < DEPTH; n++) {
        PyObject *one = (PyObject *)self->open[n];
        if (!one || self->open[n]->its.hold != hold) continue;
        Py_INCREF(one);
        PyObject *was_withdrawn = Line_withdraw(self, one);
        Py_DECREF(one);
        if (!was_withdrawn) return NULL;
        Py_DECREF(was_withdrawn);
    }
    Py_RETURN_NONE;
}

/* Read the ends that are there: calls whose results nobody takes are counted. */
static PyObject *Line_see_ends(Line *self, PyObject *unused) {
    (void)unused;
    for (int n = 0; n < DEPTH; n++) {
        Receipt *one = self->open[n];
        Py_XINCREF((PyObject *)one);
        if (one && read_end(one) > 0) count_dropped(one);
        Py_XDECREF((PyObject *)one);
    }
    Py_RETURN_NONE;
}

/* Nothing is put there any more, and nobody waits. The calls whose ends have not been read. */
static PyObject *Line_close(Line *self, PyObject *unused) {
    (void)unused;
    PyObject *found = PyList_New(0);
    __atomic_store_n(&self->bells.is_closed, 1, __ATOMIC_RELEASE);
    wake_others(&self->bells);
    for (int n = 0; found && n < DEPTH; n++) {
        Receipt *one = self->open[n];
        Py_XINCREF((PyObject *)one);
        if (one && read_end(one) <= 0 && PyList_Append(found, (PyObject *)one) < 0) Py_CLEAR(found);
        Py_XDECREF((PyObject *)one);
    }
    if (found) Line_clear(self);
    return found;
}

static PyMethodDef line_methods[] = {
    {"put", (PyCFunction)Line_put, METH_VARARGS, "put(plan, body, hold, timeout_ns): a receipt, or None"},
    {"withdraw", (PyCFunction)Line_withdraw, METH_O, "withdraw(receipt): whether the worker has not got it, nor will"},
    {"withdraw_held", (PyCFunction)Line_withdraw_held, METH_O, "withdraw_held(hold): the calls whose memory it keeps"},
    {"see_ends", (PyCFunction)Line_see_ends, METH_NOARGS, "see_ends(): of calls whose results nobody takes"},
    {"close", (PyCFunction)Line_close, METH_NOARGS, "close(): receipts of calls that are open"},
    {NULL, NULL, 0, NULL},
};
SLOTS_OF("_repeats", Line, {Py_tp_methods, line_methods},)

static PyObject *Receipt_end(Receipt *self, PyObject *unused) {
    (void)unused;
    int has_ended = read_end(self);
    if (!has_ended) Py_RETURN_NONE;
    PyObject *said = self->its.said;
    unsigned long long status = has_ended < 0 ? UINT64_MAX : self->status;
    if (!said || has_ended < 0) return Py_BuildValue("(KKy#)", status, (unsigned long long)self->kernel_ns, "", (Py_ssize_t)0);
    return Py_BuildValue("(KKO)", status, (unsigned long long)self->kernel_ns, said);
}

static PyMethodDef receipt_methods[] = {
    {"end", (PyCFunction)Receipt_end, METH_NOARGS, "end(): (status, kernel ns, what the worker says), or None; its status may be none"},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef receipt_members[] = {
    {"site", T_OBJECT, offsetof(Receipt, its) + offsetof(ReceiptFields, site), READONLY, NULL},
    {"request", T_OBJECT, offsetof(Receipt, its) + offsetof(ReceiptFields, request), READONLY, NULL},
    {"start_ns", T_OBJECT, offsetof(Receipt, its) + offsetof(ReceiptFields, start_ns), READONLY, NULL},
    {"key", T_OBJECT, offsetof(Receipt, its) + offsetof(ReceiptFields, key), READONLY, NULL},
    {"call", T_ULONGLONG, offsetof(Receipt, call), READONLY, NULL},
    {"due_ns", T_ULONGLONG, offsetof(Receipt, due_ns), 0, NULL},
    {"is_behind", T_BOOL, offsetof(Receipt, is_behind), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};
LIFE(Receipt, RECEIPT_FIELDS)
static PyType_Slot Receipt_slots[] = {{Py_tp_traverse, Receipt_traverse}, {Py_tp_clear, Receipt_clear}, {Py_tp_dealloc, Receipt_dealloc},
                                     {Py_tp_methods, receipt_methods}, {Py_tp_members, receipt_members}, {0, NULL}};
static PyType_Spec Receipt_spec = {PACKAGE "_repeats.Receipt", sizeof(Receipt), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, Receipt_slots};

/* For what is counted by Python. */
static PyObject *count_these(PyObject *module, PyObject *args) {
    unsigned long long row, ns, copied_bytes, times;
    (void)module;
    if (!PyArg_ParseTuple(args, "KKKK", &row, &ns, &copied_bytes, &times)) return NULL;
    count_calls(row, ns, copied_bytes, times);
    Py_RETURN_NONE;
}
