/* Tells where tensors lie, and whether they are alike, by the table of functions that DLPack gives for this: some 60 ns
 * for all of a tensor, where each question from Python costs 50 to 120. The structures are DLPack's
 * (https://dmlc.github.io/dlpack/latest/c_api.html), of its first major version. */
#include <stddef.h>
#include <stdint.h>

/* Python's: its headers are not everywhere. Those that return an object, and do not ``Get`` it, give a reference. */
extern char PyTuple_Type, PyList_Type;
extern void *PyTuple_GetItem(void *tuple, intptr_t place), *PyList_GetItem(void *list, intptr_t place);
extern intptr_t PyTuple_Size(void *tuple), PyList_Size(void *list);
extern int PyList_SetItem(void *list, intptr_t place, void *item); /* takes a reference */
extern void *PyObject_Type(void *object), *PyObject_CallOneArg(void *called, void *given), *PyErr_Occurred(void);
extern int PyObject_IsTrue(void *object);
extern long long PyLong_AsLongLong(void *number);
extern void Py_IncRef(void *object), Py_DecRef(void *object);

enum { MAJOR = 1, CPU = 1, PINNED_BY_CUDA = 3, AXES_MAX = 8 };

typedef struct {
    void *data;
    int32_t device, device_number;
    int32_t axis_count;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} tensor;

typedef struct {
    uint32_t major, minor;
    void *older;
    void *allocate, *take, *give;
    int (*look)(void *object, tensor *found); /* leaves an exception, and returns another number than 0 */
    void *stream;
} exchange;

/* Return the smallest distance between two of these addresses, which are sorted here: mostly they are in order, or two
 * lists in order, one after the other. */
static int64_t nearest(int64_t *addresses, uint64_t count)
{
    int64_t distance = INT64_MAX;
    for (uint64_t i = 1; i < count; i++) {
        int64_t each = addresses[i];
        uint64_t place = i;
        for (; place && addresses[place - 1] > each; place--)
            addresses[place] = addresses[place - 1];
        addresses[place] = each;
    }
    for (uint64_t i = 1; i < count; i++)
        if (addresses[i] - addresses[i - 1] < distance)
            distance = addresses[i] - addresses[i - 1];
    return distance;
}

static int is_of(void *object, const void *type)
{
    void *found = PyObject_Type(object);
    Py_DecRef(found);
    return found == type;
}

/* Put the ``width`` objects of each entry into a list, column after column, and return 1. Return 0 where an entry is no
 * plain tuple or list of so many. Nothing here runs code of Python's, which could change the entries meanwhile. */
static int gather(void *entries, uint64_t count, uint64_t width, void *tensors)
{
    for (uint64_t i = 0; i < count; i++) {
        void *entry = PyList_GetItem(entries, (intptr_t)i);
        int is_tuple = is_of(entry, &PyTuple_Type);
        if (!is_tuple && !is_of(entry, &PyList_Type))
            return 0;
        if ((uint64_t)(is_tuple ? PyTuple_Size(entry) : PyList_Size(entry)) != width)
            return 0;
        for (uint64_t j = 0; j < width; j++) {
            void *each = is_tuple ? PyTuple_GetItem(entry, (intptr_t)j) : PyList_GetItem(entry, (intptr_t)j);
            __builtin_prefetch(each); /* tensors that were last used long ago come from memory together, not in turn */
            Py_IncRef(each);
            PyList_SetItem(tensors, (intptr_t)(j * count + i), each);
        }
    }
    return 1;
}

/* Write where tensors of one kind begin, and return 1, if all have memory of the CPU and the dtype, shape and strides of
 * the first. Else return 0, perhaps with an exception. */
static int look_at(const exchange *table, const void *kind, void *tensors, uint64_t first, uint64_t count,
                   int64_t *addresses)
{
    tensor model, each;
    int64_t shape[AXES_MAX], strides[AXES_MAX];
    for (uint64_t i = 0; i < count; i++) {
        void *object = PyList_GetItem(tensors, (intptr_t)(first + i));
        if (!is_of(object, kind) || table->look(object, &each))
            return 0;
        if ((each.device != CPU && each.device != PINNED_BY_CUDA) || !each.data || !each.strides)
            return 0;
        if (!i)
            model = each;
        if (each.code != model.code || each.bits != model.bits || each.lanes != model.lanes)
            return 0;
        if (each.axis_count != model.axis_count || each.axis_count > AXES_MAX)
            return 0;
        for (int32_t axis = 0; axis < each.axis_count; axis++) {
            if (!i)
                shape[axis] = each.shape[axis], strides[axis] = each.strides[axis];
            if (each.shape[axis] != shape[axis] || each.strides[axis] != strides[axis])
                return 0;
        }
        addresses[i] = (int64_t)((uintptr_t)each.data + each.byte_offset);
    }
    return 1;
}

static int number_of(void *question, void *object, int64_t *number)
{
    void *told = PyObject_CallOneArg(question, object);
    if (!told)
        return 0;
    *number = PyLong_AsLongLong(told);
    Py_DecRef(told);
    return *number != -1 || !PyErr_Occurred();
}

/* Ask for each tensor's storage, which is kept in a list; write how many bytes the shortest has from its tensor's begin
 * on, and return 1. Return 0 where the items of one are not what lies there, or, with an exception, where one cannot
 * tell. ``questions``: is it so? its storage? a storage's begin? its size? */
static int ask(void *questions, void *tensors, void *storages, uint64_t first, uint64_t count, const int64_t *addresses,
               int64_t *room)
{
    *room = INT64_MAX;
    for (uint64_t i = 0; i < count; i++) {
        void *each = PyList_GetItem(tensors, (intptr_t)(first + i));
        void *told = PyObject_CallOneArg(PyTuple_GetItem(questions, 0), each);
        int is_odd = told ? PyObject_IsTrue(told) : -1;
        if (told)
            Py_DecRef(told);
        void *storage = is_odd ? NULL : PyObject_CallOneArg(PyTuple_GetItem(questions, 1), each);
        if (!storage)
            return 0;
        PyList_SetItem(storages, (intptr_t)(first + i), storage);
        int64_t begin, size;
        if (!number_of(PyTuple_GetItem(questions, 2), storage, &begin) ||
            !number_of(PyTuple_GetItem(questions, 3), storage, &size))
            return 0;
        if (begin + size - addresses[i] < *room)
            *room = begin + size - addresses[i];
    }
    return 1;
}

/* Look at ``count`` entries of ``width`` tensors, and return 1 if those of each column are alike, as ``look_at`` and
 * ``ask`` say (without ``questions``, none are asked). ``tensors`` and ``storages`` get them, column after column: they
 * are lists of the right length. ``words`` gets their addresses; as many words in which these are sorted; the smallest
 * distance between two; and per column the room. Else return 0, perhaps with an exception. The caller has Python's lock,
 * and nobody else has the lists. */
int kvstore_alike_4(const exchange *table, const void *kind, void *entries, uint64_t count, uint64_t width,
                    void *tensors, void *storages, void *questions, int64_t *words)
{
    uint64_t total = count * width;
    int64_t *sorted = words + total, *distance = sorted + total, *rooms = distance + 1;
    if (table->major != MAJOR || !table->look || !total || !gather(entries, count, width, tensors))
        return 0;
    for (uint64_t j = 0; j < width; j++)
        if (!look_at(table, kind, tensors, j * count, count, words + j * count))
            return 0;
    for (uint64_t j = 0; j < width && PyTuple_Size(questions); j++)
        if (!ask(questions, tensors, storages, j * count, count, words + j * count, rooms + j))
            return 0;
    for (uint64_t i = 0; i < total; i++)
        sorted[i] = words[i];
    *distance = nearest(sorted, total);
    return 1;
}
