/* Operators that torch_npu's C++ code runs directly, past the dispatcher.
 *
 * Almost none are needed: whoever calls one here gets an error with its name instead of memory that
 * nobody wrote. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common.h"

#define NO_SUCH_OPERATOR 100024 /* ACL_ERROR_OP_NOT_FOUND */

struct buffer { void *data; size_t size; };

API struct buffer *aclCreateDataBuffer(void *data, size_t size) {
    struct buffer *made = malloc(sizeof *made);
    made->data = data;
    made->size = size;
    return made;
}

API int aclDestroyDataBuffer(const struct buffer *buffer) { free((void *)buffer); return 0; }

static int refuse(const char *name) {
    char text[300];
    snprintf(text, sizeof text, "operator %s has no kernel on a virtual NPU", name);
    set_message(text);
    fprintf(stderr, "virtual NPU: %s\n", text);
    return NO_SUCH_OPERATOR;
}

/* An all-gather of tensors of any length pads what it sends: a tensor of one value, then a
 * matrix of one row made longer at its end. */
static int fill(const struct buffer *value, const struct buffer *to) {
    for (size_t at = 0; at + value->size <= to->size; at += value->size)
        memcpy((char *)to->data + at, value->data, value->size);
    return 0;
}

static int pad(const struct buffer *from, const struct buffer *widths, const struct buffer *value,
               const struct buffer *to) {
    const int32_t *before_and_after = widths->data; /* of dim 0, then of dim 1 */
    if (widths->size != 4 * sizeof(int32_t) || before_and_after[0] || before_and_after[1] || before_and_after[2] ||
        before_and_after[3] * value->size + from->size != to->size)
        return refuse("PadV3 other than at the end of one row");
    fill(value, to);
    memcpy(to->data, from->data, from->size);
    return 0;
}

static int run(const char *name, int num_inputs, struct buffer *const inputs[], int num_outputs,
               struct buffer *const outputs[]) {
    if (!strcmp(name, "Fill") && num_inputs == 2 && num_outputs == 1) return fill(inputs[1], outputs[0]);
    if (!strcmp(name, "PadV3") && num_inputs == 3 && num_outputs == 1)
        return pad(inputs[0], inputs[1], inputs[2], outputs[0]);
    return refuse(name);
}

API int aclopCompileAndExecute(const char *name, int num_inputs, void *const input_types[],
                               struct buffer *const inputs[], int num_outputs, void *const output_types[],
                               struct buffer *const outputs[], const void *attributes, int engine, int compile,
                               const char *path, void *stream) {
    return run(name, num_inputs, inputs, num_outputs, outputs);
}

API int aclopCompileAndExecuteV2(const char *name, int num_inputs, void *input_types[], struct buffer *inputs[],
                                 int num_outputs, void *output_types[], struct buffer *outputs[], void *attributes,
                                 int engine, int compile, const char *path, void *stream) {
    return run(name, num_inputs, inputs, num_outputs, outputs);
}
