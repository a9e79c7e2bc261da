#ifndef TORCHTITAN_NPU_VIRTUAL_COMMON_H
#define TORCHTITAN_NPU_VIRTUAL_COMMON_H

/* marks what torch_npu links or looks up; names without it get a stub that returns 0 */
#define API __attribute__((visibility("default")))

const char *aclGetRecentErrMsg(void);

/* text that torch_npu shows with the next error code of this thread */
void set_message(const char *text);

#endif
