/* Inside nn: what the families share. */
#ifndef SPW_NN_INTERNAL_H
#define SPW_NN_INTERNAL_H

#include "spw_nn.h"

/* Names without ".weight", behind base those of the embedding and the last norm, behind base and the layer the others but the head's. */
typedef struct spw__names {
    const char *base, *embedding, *norm;
    const char *qkv, *q, *k, *v, *out;
    const char *q_norm, *k_norm;          /* of heads, in front of rope */
    const char *linear;                   /* all of linear attention */
    const char *linear_out, *linear_norm; /* its projection and its norm, where they are not out_proj and norm */
    const char *linear_halves[2];         /* the norms of its layer's halves, where they are not the others' */
    const char *mlp_norm, *up, *down;     /* up and down: of an MLP without a gate, or with one in the same matrix */
    const char *last_norm, *head;
} spw__names;
const spw__names *spw__nn_names(spw_family family);
void spw__nn_own(spw_model *m, spw_block *b, const char *prefix, const char *name, uint64_t rows, uint64_t cols,
                 uint32_t ndim, spw_init init, float std);
void spw__nn_build_gpt2(spw_model *m);
void spw__nn_build_llama(spw_model *m); /* and its relatives */
/* The family's norm, by what is next in the block's list; at moves past it. */
spw_value *spw__nn_norm(const spw_call *call, uint32_t *at, spw_value *x);
/*
 * Linear attention (linear_attention.c): what it makes of the block's input, and a gate of it; what the gate lets of that, of rows; and
 * the block's parameters for both.
 */
spw_value *spw__nn_linear_attention(const spw_call *call, uint32_t *at, spw_value *x, spw_value **gate);
spw_value *spw__nn_linear_gated(const spw_call *call, uint32_t *at, spw_value *x, spw_value *gate);
void spw__nn_own_linear_attention(spw_model *m, spw_block *b, const char *prefix);
/* y = onto + x w^T for the block's parameter at index w, with the adapter that it may have (lora.c). onto, bias: or NULL. */
spw_value *
spw__nn_adapted(const spw_call *call, spw_value *onto, spw_value *x, uint32_t w, spw_value *bias, unsigned flags);
/*
 * An adapter beside one of a layer's experts' tensors (lora_experts.c): its two stacks, made in front of the dispatch, and what the first
 * makes of the rows that the experts read, once. inner NULL: there is none.
 */
typedef struct spw__fused_adapter {
    spw_value *inner, *outer, *narrow;
    unsigned flags; /* of both */
    uint64_t taken; /* rows of an expert's outer matrix */
} spw__fused_adapter;
spw__fused_adapter spw__nn_fused_adapter(const spw_call *call, spw_fused_kind kind);
/* The linear layers of all experts, w and b by expert, with the next of so many equal parts of the adapter. */
spw_value *spw__nn_each(spw_tape *t, spw__fused_adapter *a, uint64_t parts, spw_value *x, spw_value *routing,
                        spw_value *const *w, spw_value *const *b, unsigned flags);
/* How many tensors globs match, and an adapter beside each of them in a block (lora.c asks). */
uint32_t spw__nn_count_fused(const spw_model *m, const char *const *globs, uint32_t count);
void spw__nn_adapt_fused(spw_model *m, spw_block *b, const char *const *globs, uint32_t count);
/* By what name peft finds a linear layer or a tensor of experts, of its name in files. */
void spw__nn_name_module(const spw_model *m, const char *linear, char *name, size_t bytes);
/* An adapter's matrix A or B: "base_model.model.<module>.lora_A.weight". */
uint32_t spw__nn_add_matrix(spw_model *m, spw_block *b, const char *module, char letter, uint64_t rows, uint64_t cols);
/* onto + what a half of a block makes of x at last, which drops out at the site in training. ends: as a part's first output. */
spw_value *spw__nn_add_half(const spw_call *call, spw_value *onto, spw_value *x, uint32_t w, spw_value *bias,
                            unsigned flags, uint64_t site, bool ends);
/*
 * The indexer (indexer.c): the call's choice with memory for it, in front of what makes queries and keys; what chooses for rows of a layer with
 * an indexer, whose parameters begin there in the block's list, by what the layer's queries and keys are made of and what its queries are; and these parameters.
 */
spw_choice spw__nn_begin_choice(const spw_call *call);
/* Of so many rows that are left, those from row `first` of the batch on that choose together: whole sequences, or some of one. */
uint64_t spw__nn_rows_chosen(const spw_call *call, uint64_t first, uint64_t left);
void spw__nn_choose(const spw_call *call, uint32_t first_param, const spw_value *h, const spw_value *latent);
void spw__nn_own_indexer(spw_model *m, spw_block *b, const char *prefix);
/*
 * DeepSeek-V4 (deepseek4.c): a row's streams of an embedding, a layer of them, and what a head reads of them, whose parameters *at moves past; and the parameters of
 * a layer, but for its norms and experts, and of the head. own_experts makes the layer's mixture.
 */
spw_value *spw__nn_streams_layer(const spw_call *call, spw_value *x);
spw_value *spw__nn_streams_head(const spw_call *call, uint32_t *at, spw_value *x);
void spw__nn_own_streams_layer(spw_model *m, spw_block *b, const char *prefix,
                               void (*own_experts)(spw_model *m, spw_block *b, const char *prefix));
void spw__nn_own_streams_head(spw_model *m, spw_block *b);
/* llama.c, for it: what experts make of h by logits, onto NULL or something; and onto + an MLP of h, which ends no part. */
spw_value *spw__nn_experts(const spw_call *call, uint32_t *at, spw_value *onto, spw_value *h, spw_value *logits);
spw_value *spw__nn_add_mlp(const spw_call *call, uint32_t *at, spw_value *onto, spw_value *h);
spw_value *spw__nn_linear(const spw_call *call, uint32_t *at, spw_value *x);
/* Loss in training and evaluation, logits when call->logits_out is set. */
spw_value *spw__nn_head(const spw_call *call, spw_value *x, spw_value *w);

#endif
