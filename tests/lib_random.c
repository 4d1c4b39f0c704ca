/* See lib_random.h. */
#include "lib_random.h"
#include "lib_tiny.h"
#include "spw_base.h"
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

char random_said[480];

static uint64_t
number(const char *variable, uint64_t otherwise)
{
    const char *value = getenv(variable);
    return value != NULL ? strtoull(value, NULL, 10) : otherwise;
}

uint64_t
random_seed(void)
{
    return number("SPW_SEED", 1);
}

uint64_t
random_runs(uint64_t otherwise)
{
    return number("SPW_RUNS", otherwise);
}

uint64_t
random_pick(uint64_t run, uint32_t what, uint64_t n)
{
    uint32_t r[4];
    spw_philox(random_seed(), run, what, r);
    return (((uint64_t)r[0] << 32) | r[1]) % n;
}

void
random_paths(uint64_t at, spw_config *c, const char *dir)
{
    spw_path_list *lists[] = {&c->zero.param_path, &c->zero.optimizer_path};
    char other[300];
    snprintf(other, sizeof other, "%s/other", dir);
    (void)mkdir(other, 0700);
    for (int i = 0; i < 2; i++) {
        lists[i]->count = 2;
        snprintf(lists[i]->item[1], sizeof lists[i]->item[1], "%s", other);
        lists[i]->weight[1] = (double)(1 + random_pick(at, 2041, 5));
        lists[i]->bytes[1] = random_pick(at, 2042, 2) == 0 ? (1 + random_pick(at, 2043, 20)) << 16 : 0;
    }
}

static void
stands_still(int signal_number)
{
    static const char still[] = ": stands still\n";
    ssize_t written = write(STDERR_FILENO, random_said, strlen(random_said));
    written += write(STDERR_FILENO, still, sizeof still - 1);
    (void)signal_number;
    (void)written;
    abort();
}

void
random_says(unsigned seconds, const char *format, ...)
{
    va_list arguments;
    int at = snprintf(random_said, sizeof random_said, "SPW_SEED=%llu, ", (unsigned long long)random_seed());
    va_start(arguments, format);
    (void)vsnprintf(random_said + at, sizeof random_said - (size_t)at, format, arguments);
    va_end(arguments);
    (void)signal(SIGALRM, stands_still);
    alarm(seconds);
}

void
random_done(void)
{
    alarm(0);
}

spw_family
random_family(uint64_t run, uint32_t what)
{
    static const spw_family families[] = {SPW_FAMILY_GPT2,        SPW_FAMILY_GPT2,        SPW_FAMILY_LLAMA,
                                          SPW_FAMILY_PHI3,        SPW_FAMILY_OLMO2,       SPW_FAMILY_GEMMA3,
                                          SPW_FAMILY_GEMMA2,      SPW_FAMILY_MIXTRAL,     SPW_FAMILY_QWEN3_MOE,
                                          SPW_FAMILY_QWEN2_MOE,   SPW_FAMILY_GPT_OSS,     SPW_FAMILY_GLM4_MOE,
                                          SPW_FAMILY_DEEPSEEK_V2, SPW_FAMILY_DEEPSEEK_V3, SPW_FAMILY_MINIMAX_M2,
                                          SPW_FAMILY_OLMO3,       SPW_FAMILY_NEOX,        SPW_FAMILY_OPT,
                                          SPW_FAMILY_STARCODER2,  SPW_FAMILY_STABLELM,    SPW_FAMILY_QWEN3_5,
                                          SPW_FAMILY_QWEN3_NEXT,  SPW_FAMILY_GEMMA4,      TINY_GEMMA4_SMALL,
                                          SPW_FAMILY_ERNIE_MOE,   SPW_FAMILY_HY_V3,       SPW_FAMILY_HUNYUAN,
                                          SPW_FAMILY_HUNYUAN_MOE, SPW_FAMILY_COHERE2,     SPW_FAMILY_GRANITE_HYBRID,
                                          SPW_FAMILY_LLAMA4,      SPW_FAMILY_GLM_DSA,     SPW_FAMILY_NEMOTRON_H,
                                          TINY_FEW_KEYS,          SPW_FAMILY_MISTRAL4,    SPW_FAMILY_MIMO_V2,
                                          SPW_FAMILY_LFM2_MOE,    SPW_FAMILY_AFMOE,       SPW_FAMILY_OLMO_HYBRID,
                                          SPW_FAMILY_FALCON_H1,   SPW_FAMILY_DEEPSEEK_V4, SPW_FAMILY_KIMI_LINEAR};
    return families[random_pick(run, what, sizeof families / sizeof families[0])];
}
