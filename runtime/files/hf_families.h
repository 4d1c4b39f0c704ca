/*
 * Hugging Face's families by what their classes share: sets, a bit for each family. What is asked of more than two of them, or at more than
 * one place, is asked of a set. Short names: included by hf_*.c alone.
 */
#ifndef HF_FAMILIES_H
#define HF_FAMILIES_H
#include "../nn/spw_nn.h"

/* More than 64 bits; no other type of C11 is as simple. */
__extension__ typedef unsigned __int128 hf_families;

#define OF(family)  ((hf_families)1 << SPW_FAMILY_##family)
#define GPT2        OF(GPT2)
#define LLAMA       OF(LLAMA)
#define MISTRAL     (OF(MISTRAL) | OF(MINISTRAL3))
#define QWEN        (OF(QWEN2) | OF(QWEN3))
#define MISTRAL4    OF(MISTRAL4)
#define GROWING     (OF(MINISTRAL3) | MISTRAL4) /* queries grow with their place */
#define MIXTRAL     OF(MIXTRAL)
#define QWEN2_MOE   OF(QWEN2_MOE)
#define QWEN_MOE    (QWEN2_MOE | OF(QWEN3_MOE))
#define EXPERTS     (MIXTRAL | QWEN_MOE)
#define PHI3        OF(PHI3)
#define SMOLLM3     OF(SMOLLM3)
#define OLMO3       OF(OLMO3)
#define OLMO        (OF(OLMO2) | OLMO3)
#define GEMMA2      OF(GEMMA2)
#define GEMMA3      OF(GEMMA3)
#define GEMMA       (GEMMA2 | GEMMA3)
#define GEMMA4      OF(GEMMA4)
#define GPT_OSS     OF(GPT_OSS)
#define GLM         OF(GLM4_MOE)
#define MINIMAX     OF(MINIMAX_M2)
#define DEEPSEEK_V2 OF(DEEPSEEK_V2)
#define DEEPSEEK_V3 OF(DEEPSEEK_V3)
#define GLM_LITE    OF(GLM4_LITE)
#define GLM_DSA     OF(GLM_DSA)
#define INDEXED     (OF(DEEPSEEK_V32) | GLM_DSA) /* latent attention of keys that an indexer chooses */
#define LATENT      (DEEPSEEK_V2 | DEEPSEEK_V3 | GLM_LITE | INDEXED | MISTRAL4)
#define SOFTMAX     (DEEPSEEK_V2 | MISTRAL4) /* of those, whose choices and weights are no sigmoids */
#define DOTS        OF(DOTS1)
#define SOLAR       OF(SOLAR_OPEN)
#define EXAONE_MOE  OF(EXAONE_MOE)
#define MIMO        OF(MIMO_V2)
#define BESIDE      (GLM | DOTS | SOLAR | EXAONE_MOE | MIMO) /* experts are DeepSeek's, attention is not */
#define SHARED      (BESIDE | LATENT) /* an expert of all rows beside the others, by DeepSeek's names */
#define GEMMA1      OF(GEMMA)
#define GEMMAS      (GEMMA1 | GEMMA | GEMMA4)
#define GRANITE4    OF(GRANITE_HYBRID)
#define GRANITE     (OF(GRANITE) | GRANITE4)
#define OLMOE       OF(OLMOE)
#define LLAMA4      OF(LLAMA4)
#define SEED_OSS    OF(SEED_OSS)
#define GLM_DENSE   (OF(GLM) | OF(GLM4))
#define ERNIE_MOE   OF(ERNIE_MOE)
#define ERNIE       (OF(ERNIE) | ERNIE_MOE)
#define HY          OF(HY_V3)
#define HUNYUAN_MOE OF(HUNYUAN_MOE)
#define HUNYUAN     (OF(HUNYUAN) | HUNYUAN_MOE)
#define EXAONE      (OF(EXAONE4) | EXAONE_MOE)
#define QWEN3_5     (OF(QWEN3_5) | OF(QWEN3_5_MOE))
#define QWEN3_NEXT  OF(QWEN3_NEXT)
#define LINEAR      (QWEN3_5 | QWEN3_NEXT)
#define LINEAR_MOE  (OF(QWEN3_5_MOE) | QWEN3_NEXT)
#define BAMBA       OF(BAMBA)
#define AFMOE       OF(AFMOE)
#define OLMO_HYBRID OF(OLMO_HYBRID)
#define FALCON      OF(FALCON_H1)
#define KIMI        OF(KIMI_LINEAR)
#define LFM_MOE     OF(LFM2_MOE)
#define LFM         (OF(LFM2) | LFM_MOE)
#define FULL                                                                                                           \
    (GEMMA1 | GRANITE | OLMOE | SEED_OSS | (SHARED & ~(DOTS | EXAONE_MOE | MIMO)) | MINIMAX | GLM_DENSE | ERNIE | HY | \
     HUNYUAN | LINEAR | LLAMA4 | LFM | BAMBA | OLMO_HYBRID | FALCON | KIMI) /* without a window */
#define LLAMAS                                                                                                         \
    (FULL | DOTS | LLAMA | MISTRAL | QWEN | EXPERTS | PHI3 | SMOLLM3 | OLMO | GEMMA | GEMMA4 | GPT_OSS | EXAONE |      \
     MIMO | AFMOE)
#define NEOX        OF(NEOX)
#define OPT         OF(OPT)
#define STARCODER2  OF(STARCODER2)
#define STABLELM    OF(STABLELM)
#define COHERE2     OF(COHERE2)
#define COHERE      (OF(COHERE) | COHERE2)
#define NEMOTRON    OF(NEMOTRON_H)
#define DEEPSEEK_V4 OF(DEEPSEEK_V4)
#define LAYER_NORM  (NEOX | OPT | STARCODER2 | STABLELM | COHERE)
#define ALL         (GPT2 | LLAMAS | LAYER_NORM | NEMOTRON | DEEPSEEK_V4)

_Static_assert(SPW_FAMILY_COUNT <= 128, "a bit for each family");
static inline bool
spw__hf_of(spw_family family, hf_families families)
{
    return (families >> family & 1) != 0;
}

#endif
