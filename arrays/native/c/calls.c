/* The path of a small call: `invoke` of dispatch.py, `Recording.record` of record.py (`note`), and the loop of `walk` in backward.py
(`pull`). Each does what that Python function does in the plain case, arrays of NumPy, and hands all else to it. Where this module was
not built the Python functions do it all.

Slots of Python's classes are read at their offsets, as the interpreter does; `bind_calls` and `bind_tape` look these up. */

#define PY_SSIZE_T_CLEAN
#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_2_0_API_VERSION
#include <Python.h>
#include <numpy/arrayobject.h>
#include <numpy/arrayscalars.h>
#include <stddef.h>
#include <structmember.h>

#define SLOT(object, offset) (*(PyObject **)((char *)(object) + (offset)))
#define MOST_VALUES 30 /* of a call, or of a rule */
#define IS_SEQUENCE(x) (PyTuple_Check(x) || PyList_Check(x))
#define IS_ARRAY(buf) (Py_TYPE(buf) == &PyArray_Type)

static struct {
    PyTypeObject *array, *op, *tape, *plan;
    PyObject *state, *ids, *no_params, *explained, *results, *theirs, *call_site, *of_short, *getframe; /* of dispatch.py, array.py and sys */
    PyObject *constant, *aval, *same, *give;                                                 /* of the tape */
    Py_ssize_t buf, id, numpy, nout, plans, nondifferentiable, records, live;
    Py_ssize_t saves, pick, keeps_result, rest, plain, partial, together, wanted, pulls, places;
} on;

static PyObject *zero, *one, *s_dict, *s_recorders, *s_origin, *s_site, *s_record, *s_others, *s_name, *s_ours;

/* The offset of a slot, or -1 with an exception. */
static Py_ssize_t offset_of(PyObject *type, const char *name) {
    PyObject *member = PyObject_GetAttrString(type, name);
    if (!member) return -1;
    Py_ssize_t offset = -1;
    if (Py_IS_TYPE(member, &PyMemberDescr_Type)) offset = ((PyMemberDescrObject *)member)->d_member->offset;
    else PyErr_Format(PyExc_TypeError, "%s is no slot", name);
    Py_DECREF(member);
    return offset;
}

/* An Array around a buffer, whose reference it takes. */
static PyObject *wrap(PyObject *buf) {
    PyObject *x = on.array->tp_alloc(on.array, 0);
    if (!x) {
        Py_DECREF(buf);
        return NULL;
    }
    SLOT(x, on.buf) = buf;
    SLOT(x, on.id) = Py_NewRef(zero);
    return x;
}

/* ----- recording ----------------------------------------------------------------------------------------------------------------- */

/* An attribute of the context of this thread, borrowed; None where it was never set. */
static PyObject *of_thread(PyObject *context, PyObject *name) {
    PyObject *value = PyDict_GetItemWithError(context, name);
    return value || PyErr_Occurred() ? value : Py_None;
}

/* Whether a frame runs code of this package; -1 with an exception. */
static int is_ours(PyFrameObject *frame) {
    PyObject *globals = PyFrame_GetGlobals(frame), *name = PyDict_GetItemWithError(globals, s_name);
    int ours = PyErr_Occurred() ? -1 : 0;
    if (name && PyUnicode_Check(name)) ours = (int)PyUnicode_Tailmatch(name, s_ours, 0, PY_SSIZE_T_MAX, -1);
    Py_DECREF(globals);
    return ours;
}

/* `call_site`, where that line is in a file that was met before. */
static PyObject *site_of(PyObject *context) {
    PyObject *site = of_thread(context, s_site);
    if (!site) return NULL;
    if (site != Py_None) return Py_NewRef(site);
    /* The current frame is ours: that of an operator, or of `apply`. */
    PyFrameObject *frame = (PyFrameObject *)PyObject_CallOneArg(on.getframe, one);
    if (!frame) return NULL;
    int theirs = 0, ours = 1;
    for (site = NULL; frame && !theirs && ours > 0;) {
        PyCodeObject *code = PyFrame_GetCode(frame);
        theirs = PySet_Contains(on.theirs, code->co_filename);
        if (theirs > 0) site = Py_BuildValue("(Oi)", code, PyFrame_GetLasti(frame));
        else if (!theirs && (ours = is_ours(frame)) > 0) Py_SETREF(frame, PyFrame_GetBack(frame));
        Py_DECREF(code);
    }
    Py_XDECREF(frame);
    return site || theirs || ours < 0 ? site : PyObject_CallNoArgs(on.call_site);
}

/* What a plan keeps of a call: `plan.pick` of the buffers, and `plan.others`. */
static PyObject *kept_of(PyObject *plan, PyObject *args, PyObject *bufs, PyObject *const *outs, Py_ssize_t nout, PyObject *params) {
    PyObject *kept = NULL, *rest = SLOT(plan, on.rest);
    const Py_ssize_t n = PySequence_Fast_GET_SIZE(bufs), saves = PyTuple_GET_SIZE(SLOT(plan, on.saves));
    const int with_result = SLOT(plan, on.keeps_result) == Py_True;
    if (saves == 0) kept = PyTuple_New(0);
    else if (saves == n && !with_result && PyTuple_CheckExact(bufs)) kept = Py_NewRef(bufs);
    else if (!with_result) kept = PyObject_CallOneArg(SLOT(plan, on.pick), bufs);
    else {
        PyObject *all = PyTuple_New(n + nout);
        if (!all) return NULL;
        for (Py_ssize_t i = 0; i < n; i++) PyTuple_SET_ITEM(all, i, Py_NewRef(PySequence_Fast_GET_ITEM(bufs, i)));
        for (Py_ssize_t i = 0; i < nout; i++) PyTuple_SET_ITEM(all, n + i, Py_NewRef(SLOT(outs[i], on.buf)));
        kept = PyObject_CallOneArg(SLOT(plan, on.pick), all);
        Py_DECREF(all);
    }
    if (!kept || PyTuple_GET_SIZE(rest) == 0) return kept;
    PyObject *others = PyObject_CallMethodObjArgs(plan, s_others, args, params, NULL);
    PyObject *both = others ? PySequence_InPlaceConcat(kept, others) : NULL;
    Py_XDECREF(others);
    Py_DECREF(kept);
    return both;
}

/* Whether a dtype has no derivative, or one in a dtype of its own: neither is short, nor complex, nor of another byte order. */
static int is_plain_dtype(PyArray_Descr *dtype) {
    return dtype->type_num == NPY_DOUBLE || dtype->type_num == NPY_FLOAT ? PyArray_ISNBO(dtype->byteorder) : PyTypeNum_ISINTEGER(dtype->type_num);
}

/* Shape and dtype of a result, which has a name from now on, and is followed by a tape where it has a derivative. */
static PyObject *followed(PyObject *live, PyObject *result, int single) {
    PyArrayObject *buf = (PyArrayObject *)SLOT(result, on.buf);
    PyObject *dtype = (PyObject *)PyArray_DESCR(buf);
    if (SLOT(result, on.id) == zero) {
        PyObject *name = PyIter_Next(on.ids);
        if (!name) return NULL;
        Py_SETREF(SLOT(result, on.id), name);
    }
    PyObject *shape = PyArray_IntTupleFromIntp(PyArray_NDIM(buf), PyArray_DIMS(buf));
    PyObject *of = !shape ? NULL : single ? PyTuple_Pack(2, shape, dtype) : PyObject_CallFunction(on.aval, "((OO))", shape, dtype);
    Py_XDECREF(shape);
    if (of && PyArray_ISFLOAT(buf) && PyDict_SetItem(live, SLOT(result, on.id), of) < 0) Py_CLEAR(of);
    return of;
}

/* `Recording.record`: 1 where the call was noted or needs no note, 0 where that method has to do it, -1 with an exception. */
static int note(PyObject *tape, PyObject *op, PyObject *args, PyObject *bufs, PyObject *const *outs, Py_ssize_t nout, PyObject *params,
                PyObject *context) {
    const int constant = PyObject_IsTrue(SLOT(op, on.nondifferentiable));
    if (constant) return constant;
    PyObject *live = SLOT(tape, on.live);
    const Py_ssize_t n = PySequence_Fast_GET_SIZE(args);
    if (n > MOST_VALUES) return 0;
    for (Py_ssize_t i = 0; i < nout; i++)
        if (!is_plain_dtype(PyArray_DESCR((PyArrayObject *)SLOT(outs[i], on.buf)))) return 0;
    int done = -1;
    long mask = 1;
    PyObject *key = NULL, *plan = NULL, *outputs = NULL, *avals = NULL, *kept = NULL, *site = NULL, *fields = NULL;
    PyObject *origin = of_thread(context, s_origin), *names = PyList_New(n);
    if (!names || !origin) goto end;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *a = PySequence_Fast_GET_ITEM(args, i);
        mask += mask;
        if (Py_IS_TYPE(a, on.array)) {
            PyObject *id = SLOT(a, on.id);
            if (!id) goto other;
            const int watched = PyDict_Contains(live, id);
            if (watched < 0) goto end;
            if (watched) mask++;
            else if (SLOT(a, on.buf) != PySequence_Fast_GET_ITEM(bufs, i)) goto other;
            PyList_SET_ITEM(names, i, Py_NewRef(id));
        } else {
            PyObject *number = PyFloat_CheckExact(a) ? Py_NewRef(a) : PyObject_CallFunction(on.constant, "((O))", a);
            if (!number) goto end;
            PyList_SET_ITEM(names, i, number);
        }
    }
    if (!(key = PyLong_FromLong(mask))) goto end;
    if (!(plan = Py_XNewRef(PyDict_GetItemWithError(SLOT(op, on.plans), key)))) {
        if (!PyErr_Occurred()) goto other;
        goto end;
    }
    if (plan == Py_None) {
        done = 1;
        goto end;
    }
    if (!Py_IS_TYPE(plan, on.plan)) goto other;
    if (!(outputs = PyTuple_New(nout)) || !(avals = nout == 1 ? Py_NewRef(Py_None) : PyTuple_New(nout))) goto end;
    for (Py_ssize_t i = 0; i < nout; i++) {
        PyObject *of = followed(live, outs[i], nout == 1);
        if (!of) goto end;
        PyTuple_SET_ITEM(outputs, i, Py_NewRef(SLOT(outs[i], on.id)));
        if (nout == 1) Py_DECREF(of);
        else PyTuple_SET_ITEM(avals, i, of);
    }
    if (!(kept = kept_of(plan, args, bufs, outs, nout, params)) || !(site = site_of(context))) goto end;
    fields = PyTuple_Pack(8, plan, names, outputs, kept, params, avals, origin, site);
    done = fields && PyList_Append(SLOT(tape, on.records), fields) == 0 ? 1 : -1;
    goto end;
other:
    done = 0;
end:
    Py_XDECREF(key);
    Py_XDECREF(plan);
    Py_XDECREF(outputs);
    Py_XDECREF(avals);
    Py_XDECREF(kept);
    Py_XDECREF(site);
    Py_XDECREF(fields);
    Py_XDECREF(names);
    return done;
}

/* ----- calls --------------------------------------------------------------------------------------------------------------------- */

/* Shows a call to the recorders of this thread. */
static int shown(PyObject *op, PyObject *args, PyObject *bufs, PyObject *result, PyObject *params) {
    PyObject *context = PyObject_GetAttr(on.state, s_dict);
    if (!context) return -1;
    const int single = Py_IS_TYPE(result, on.array);
    PyObject *const *all = single ? &result : PySequence_Fast_ITEMS(result);
    const Py_ssize_t nout = single ? 1 : PyTuple_GET_SIZE(result);
    int done = 0, plain = 1;
    for (Py_ssize_t i = 0; i < nout; i++) plain = plain && Py_IS_TYPE(all[i], on.array) && IS_ARRAY(SLOT(all[i], on.buf));
    PyObject *recorders = PyDict_GetItemWithError(context, s_recorders), *outs = NULL;
    if (!recorders) done = PyErr_Occurred() ? -1 : 0;
    Py_XINCREF(recorders);
    for (Py_ssize_t i = 0; done >= 0 && recorders && i < PyTuple_GET_SIZE(recorders); i++) {
        PyObject *r = PyTuple_GET_ITEM(recorders, i);
        done = plain && Py_IS_TYPE(r, on.tape) ? note(r, op, args, bufs, all, nout, params, context) : 0;
        if (done) continue;
        if (!outs) outs = single ? PyTuple_Pack(1, result) : Py_NewRef(result);
        PyObject *none = outs ? PyObject_CallMethodObjArgs(r, s_record, op, args, bufs, outs, params, NULL) : NULL;
        if (!none) done = -1;
        Py_XDECREF(none);
    }
    Py_XDECREF(outs);
    Py_XDECREF(recorders);
    Py_DECREF(context);
    return done < 0 ? -1 : 0;
}

/* Raises the error of a call anew, as `invoke` explains it. */
static void explain(PyObject *op, PyObject *args, PyObject *params) {
    if (!PyErr_ExceptionMatches(PyExc_ValueError) && !PyErr_ExceptionMatches(PyExc_TypeError) &&
        !PyErr_ExceptionMatches(PyExc_OverflowError) && !PyErr_ExceptionMatches(PyExc_MemoryError))
        return;
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback) PyException_SetTraceback(error, traceback);
    PyObject *none = PyObject_CallFunctionObjArgs(on.explained, op, args, params, error, NULL);
    Py_XDECREF(none);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
}

static int are_arrays(PyObject *values) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(values); i++)
        if (!IS_ARRAY(PyTuple_GET_ITEM(values, i))) return 0;
    return 1;
}

PyDoc_STRVAR(invoke_doc, "invoke(op, args, bufs, params) -> Array | tuple\n\nThe function of this name of `dispatch`.");

static PyObject *invoke(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t count) {
    if (count < 3 || count > 4 || !PyObject_TypeCheck(given[0], on.op) || !IS_SEQUENCE(given[1]) || !IS_SEQUENCE(given[2])) {
        PyErr_SetString(PyExc_TypeError, "invoke(op, args, bufs, params)");
        return NULL;
    }
    PyObject *op = given[0], *args = given[1], *bufs = given[2], *params = count > 3 ? given[3] : on.no_params;
    PyObject *fn = SLOT(op, on.numpy), *first = PySequence_Fast_GET_SIZE(bufs) ? PySequence_Fast_GET_ITEM(bufs, 0) : NULL, *out = NULL;
    if (first && IS_ARRAY(first) && PyArray_TYPE((PyArrayObject *)first) >= NPY_HALF) { /* `numpy_form` */
        PyObject *of_short = PyDict_GetItemWithError(on.of_short, fn);
        if (!of_short && PyErr_Occurred()) return NULL;
        fn = of_short ? of_short : fn;
    }
    Py_INCREF(fn);
    if (params != on.no_params) {
        PyObject *operands = PySequence_Tuple(bufs), *named = PyObject_CallOneArg((PyObject *)&PyDict_Type, params);
        if (operands && named) out = PyObject_Call(fn, operands, named);
        Py_XDECREF(operands);
        Py_XDECREF(named);
    } else out = PyObject_Vectorcall(fn, PySequence_Fast_ITEMS(bufs), PySequence_Fast_GET_SIZE(bufs), NULL);
    Py_DECREF(fn);
    if (!out) {
        explain(op, args, params);
        return NULL;
    }
    if (PyArray_IsScalar(out, Floating)) { /* NumPy's result without dimensions */
        Py_SETREF(out, PyArray_FromScalar(out, NULL));
        if (!out) return NULL;
    }
    PyObject *result;
    if (IS_ARRAY(out) && SLOT(op, on.nout) == one) result = wrap(out);
    else if (PyTuple_CheckExact(out) && SLOT(op, on.nout) != one && are_arrays(out)) {
        result = PyTuple_New(PyTuple_GET_SIZE(out));
        for (Py_ssize_t i = 0; result && i < PyTuple_GET_SIZE(out); i++) {
            PyObject *x = wrap(Py_NewRef(PyTuple_GET_ITEM(out, i)));
            if (!x) Py_CLEAR(result);
            else PyTuple_SET_ITEM(result, i, x);
        }
        Py_DECREF(out);
    } else {
        result = PyObject_CallFunctionObjArgs(on.results, op, out, NULL);
        Py_DECREF(out);
    }
    if (result && shown(op, args, bufs, result, params) < 0) Py_CLEAR(result);
    return result;
}

/* ----- the backward pass --------------------------------------------------------------------------------------------------------- */

static int fits(PyObject *g, PyObject *of) {
    if (!IS_ARRAY(g)) return 0;
    PyArrayObject *x = (PyArrayObject *)g;
    PyObject *shape = PyTuple_GET_ITEM(of, 0);
    if ((PyObject *)PyArray_DESCR(x) != PyTuple_GET_ITEM(of, 1) || PyArray_NDIM(x) != PyTuple_GET_SIZE(shape)) return 0;
    for (int i = 0; i < PyArray_NDIM(x); i++)
        if (PyLong_AsSsize_t(PyTuple_GET_ITEM(shape, i)) != PyArray_DIM(x, i)) return 0;
    return 1;
}

/* `_give`: adds to the cotangent of the value `v`. */
static int give(PyObject *g, PyObject *v, PyObject *live, PyObject *cots, PyObject *owned, PyObject *xp) {
    PyObject *of = PyDict_GetItemWithError(live, v), *before = PyDict_GetItemWithError(cots, v);
    if (PyErr_Occurred()) return -1;
    if (of && fits(g, of) && (!before || IS_ARRAY(before))) {
        if (!before) return PyDict_SetItem(cots, v, g);
        const int mine = PySet_Contains(owned, v);
        if (mine < 0) return -1;
        Py_INCREF(before);
        PyObject *total = mine ? PyNumber_InPlaceAdd(before, g) : PyNumber_Add(before, g);
        int done = total ? 0 : -1;
        if (total && total != before) done = PyDict_SetItem(cots, v, total);
        if (!done && !mine && IS_ARRAY(total)) done = PySet_Add(owned, v);
        Py_DECREF(before);
        Py_XDECREF(total);
        return done;
    }
    PyObject *none = PyObject_CallFunctionObjArgs(on.give, g, v, live, cots, owned, xp, Py_False, NULL);
    Py_XDECREF(none);
    return none ? 0 : -1;
}

/* The value of a rule at the cotangent of the result (or a tuple of those of several): its arguments are at these places of what is
kept, or found by a function. */
static PyObject *pulled(PyObject *rule, PyObject *find, PyObject *places, PyObject *xp, PyObject *g, PyObject *kept) {
    if (rule == on.same) return Py_NewRef(g);
    PyObject *stack[MOST_VALUES + 2] = {xp, g};
    const Py_ssize_t n = PyTuple_Check(places) ? PyTuple_GET_SIZE(places) : MOST_VALUES + 1;
    if (n <= MOST_VALUES) {
        for (Py_ssize_t i = 0; i < n; i++) stack[2 + i] = PySequence_Fast_GET_ITEM(kept, PyLong_AsSsize_t(PyTuple_GET_ITEM(places, i)));
        return PyObject_Vectorcall(rule, stack, 2 + n, NULL);
    }
    PyObject *needs = PyObject_CallOneArg(find, kept), *front = PyTuple_Pack(2, xp, g);
    PyObject *list = needs ? PySequence_Tuple(needs) : NULL, *all = list && front ? PySequence_Concat(front, list) : NULL;
    PyObject *found = all ? PyObject_CallObject(rule, all) : NULL;
    Py_XDECREF(needs);
    Py_XDECREF(front);
    Py_XDECREF(list);
    Py_XDECREF(all);
    return found;
}

/* The cotangent of a result that nothing depends on. */
static PyObject *nothing(PyObject *plan, PyObject *aval) {
    if (SLOT(plan, on.partial) == Py_True) return Py_NewRef(Py_None);
    PyArray_Dims shape = {NULL, 0};
    if (!PyArray_IntpConverter(PyTuple_GET_ITEM(aval, 0), &shape)) return NULL;
    PyObject *zeros = PyArray_Zeros(shape.len, shape.ptr, (PyArray_Descr *)Py_NewRef(PyTuple_GET_ITEM(aval, 1)), 0);
    PyDimMem_FREE(shape.ptr);
    return zeros;
}

/* Takes the cotangents of a record's results out of `cots`: that of one, or a tuple; None where nothing depends on any. */
static PyObject *taken(PyObject *fields, PyObject *cots, PyObject *keep, PyObject *owned) {
    PyObject *outputs = PyTuple_GET_ITEM(fields, 2), *g;
    const Py_ssize_t n = PyTuple_GET_SIZE(outputs);
    PyObject *gs = PyTuple_New(n);
    int done = gs ? 0 : -1, some = 0;
    for (Py_ssize_t i = 0; done >= 0 && i < n; i++) {
        PyObject *v = PyTuple_GET_ITEM(outputs, i);
        if (!(g = PyDict_GetItemWithError(cots, v))) continue; /* `pull` has looked for it, and there was no error */
        some = 1;
        PyTuple_SET_ITEM(gs, i, Py_NewRef(g));
        const int stays = PySet_Contains(keep, v);
        done = stays < 0 || (!stays && PyDict_DelItem(cots, v) < 0) || PySet_Discard(owned, v) < 0 ? -1 : 0;
    }
    for (Py_ssize_t i = 0; done >= 0 && some && i < n; i++) {
        if (PyTuple_GET_ITEM(gs, i)) continue;
        if (!(g = nothing(PyTuple_GET_ITEM(fields, 0), PyTuple_GET_ITEM(PyTuple_GET_ITEM(fields, 5), i)))) done = -1;
        else PyTuple_SET_ITEM(gs, i, g);
    }
    g = done < 0 ? NULL : Py_NewRef(!some ? Py_None : n == 1 ? PyTuple_GET_ITEM(gs, 0) : gs);
    Py_XDECREF(gs);
    return g;
}

/* Gives the cotangents of a record's operands: by the rule of all of them, or by those of each. */
static int passed_on(PyObject *fields, PyObject *g, PyObject *live, PyObject *cots, PyObject *owned, PyObject *xp) {
    PyObject *plan = PyTuple_GET_ITEM(fields, 0), *inputs = PyTuple_GET_ITEM(fields, 1), *kept = PyTuple_GET_ITEM(fields, 3);
    PyObject *together = SLOT(plan, on.together), *pulls = SLOT(plan, on.pulls), *places = SLOT(plan, on.places), *found = NULL;
    const int joint = together != Py_None;
    if (joint && !(found = pulled(PyTuple_GET_ITEM(together, 0), PyTuple_GET_ITEM(together, 1), Py_None, xp, g, kept))) return -1;
    const Py_ssize_t n = PyTuple_GET_SIZE(joint ? SLOT(plan, on.wanted) : pulls);
    int done = 0;
    for (Py_ssize_t i = 0; done >= 0 && i < n; i++) {
        PyObject *gx, *at = joint ? PyTuple_GET_ITEM(SLOT(plan, on.wanted), i) : PyTuple_GET_ITEM(PyTuple_GET_ITEM(pulls, i), 0);
        if (!joint) {
            PyObject *one_of = PyTuple_GET_ITEM(pulls, i);
            gx = pulled(PyTuple_GET_ITEM(one_of, 1), PyTuple_GET_ITEM(one_of, 2), PyTuple_GET_ITEM(places, i), xp, g, kept);
        } else if (PyDict_CheckExact(found)) {
            gx = PyDict_GetItemWithError(found, at);
            gx = gx || PyErr_Occurred() ? Py_XNewRef(gx) : Py_NewRef(Py_None);
        } else gx = PyObject_GetItem(found, at);
        if (!gx) done = -1;
        else if (gx != Py_None) done = give(gx, PySequence_Fast_GET_ITEM(inputs, PyLong_AsSsize_t(at)), live, cots, owned, xp);
        Py_XDECREF(gx);
    }
    Py_XDECREF(found);
    return done;
}

PyDoc_STRVAR(pull_doc, "pull(records, cots, keep, owned, live, xp)\n\nThe loop of `walk`, up to a record that is not plain.");

static PyObject *pull(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t count) {
    if (count != 6 || !PyList_CheckExact(given[0])) {
        PyErr_SetString(PyExc_TypeError, "pull(records, cots, keep, owned, live, xp)");
        return NULL;
    }
    PyObject *records = given[0], *cots = given[1], *keep = given[2], *owned = given[3], *live = given[4], *xp = given[5];
    int done = 0;
    for (Py_ssize_t n; done >= 0 && (n = PyList_GET_SIZE(records)) > 0;) {
        PyObject *fields = PyList_GET_ITEM(records, n - 1), *plan = PyTuple_GET_ITEM(fields, 0), *outputs = PyTuple_GET_ITEM(fields, 2);
        int plain = Py_IS_TYPE(plan, on.plan) && SLOT(plan, on.plain) == Py_True;
        for (Py_ssize_t i = 0; plain && i < PyTuple_GET_SIZE(outputs); i++) {
            PyObject *g = PyDict_GetItemWithError(cots, PyTuple_GET_ITEM(outputs, i));
            if (!g && PyErr_Occurred()) return NULL;
            plain = !g || IS_ARRAY(g) || PyArray_IsScalar(g, Generic);
        }
        if (!plain) break;
        Py_INCREF(fields);
        PyObject *g = taken(fields, cots, keep, owned);
        done = !g ? -1 : g == Py_None ? 0 : passed_on(fields, g, live, cots, owned, xp);
        Py_XDECREF(g);
        /* (A record whose rule raised stays: `walk` names it.) */
        if (done >= 0) done = PyList_SetSlice(records, n - 1, n, NULL);
        Py_DECREF(fields);
    }
    if (done < 0) return NULL;
    Py_RETURN_NONE;
}

/* ----- the module ---------------------------------------------------------------------------------------------------------------- */

PyDoc_STRVAR(bind_calls_doc, "The classes and functions of `dispatch`.");

static PyObject *bind_calls(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *array, *op;
    if (!PyArg_ParseTuple(args, "OOOOOOOOOO", &array, &op, &on.state, &on.ids, &on.no_params, &on.explained, &on.results, &on.theirs,
                          &on.call_site, &on.of_short))
        return NULL;
    if ((on.buf = offset_of(array, "_buf")) < 0 || (on.id = offset_of(array, "_id")) < 0 || (on.numpy = offset_of(op, "numpy")) < 0 ||
        (on.nout = offset_of(op, "nout")) < 0 || (on.plans = offset_of(op, "plans")) < 0 ||
        (on.nondifferentiable = offset_of(op, "nondifferentiable")) < 0)
        return NULL;
    Py_INCREF(args); /* for ever */
    on.array = (PyTypeObject *)array;
    on.op = (PyTypeObject *)op;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(bind_tape_doc, "The classes and functions of the tape.");

static PyObject *bind_tape(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *tape, *plan;
    if (!PyArg_ParseTuple(args, "OOOOOO", &tape, &plan, &on.constant, &on.aval, &on.same, &on.give)) return NULL;
    if ((on.records = offset_of(tape, "_records")) < 0 || (on.live = offset_of(tape, "live")) < 0 ||
        (on.saves = offset_of(plan, "saves")) < 0 || (on.pick = offset_of(plan, "pick")) < 0 ||
        (on.keeps_result = offset_of(plan, "keeps_result")) < 0 || (on.rest = offset_of(plan, "rest")) < 0 ||
        (on.plain = offset_of(plan, "plain")) < 0 || (on.partial = offset_of(plan, "partial")) < 0 ||
        (on.together = offset_of(plan, "together")) < 0 || (on.wanted = offset_of(plan, "wanted")) < 0 ||
        (on.pulls = offset_of(plan, "pulls")) < 0 || (on.places = offset_of(plan, "places")) < 0)
        return NULL;
    Py_INCREF(args); /* for ever */
    on.plan = (PyTypeObject *)plan;
    on.tape = (PyTypeObject *)tape;
    Py_RETURN_NONE;
}

static PyMethodDef METHODS[] = {{"invoke", (PyCFunction)(void (*)(void))invoke, METH_FASTCALL, invoke_doc},
                                {"pull", (PyCFunction)(void (*)(void))pull, METH_FASTCALL, pull_doc},
                                {"bind_calls", bind_calls, METH_VARARGS, bind_calls_doc},
                                {"bind_tape", bind_tape, METH_VARARGS, bind_tape_doc},
                                {NULL, NULL, 0, NULL}};

static int fill(PyObject *Py_UNUSED(module)) {
    if (PyArray_ImportNumPyAPI() < 0) return -1;
    zero = PyLong_FromLong(0);
    one = PyLong_FromLong(1);
    s_dict = PyUnicode_InternFromString("__dict__");
    s_recorders = PyUnicode_InternFromString("recorders");
    s_origin = PyUnicode_InternFromString("origin");
    s_site = PyUnicode_InternFromString("site");
    s_record = PyUnicode_InternFromString("record");
    s_others = PyUnicode_InternFromString("others");
    s_name = PyUnicode_InternFromString("__name__");
    s_ours = PyUnicode_InternFromString("meshtape.");
    on.getframe = Py_XNewRef(PySys_GetObject("_getframe"));
    return PyErr_Occurred() ? -1 : 0;
}

static PyModuleDef_Slot SLOTS[] = {{Py_mod_exec, (void *)fill}, {0, NULL}};

static struct PyModuleDef DEFINITION = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_calls",
    .m_doc = "The path of a small call.",
    .m_methods = METHODS,
    .m_slots = SLOTS,
};

PyMODINIT_FUNC PyInit__calls(void) { return PyModuleDef_Init(&DEFINITION); }
