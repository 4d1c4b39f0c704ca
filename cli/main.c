/* The program: picks the command. One file per command, of train several, on the public API only. */
#include "cli.h"
#include <jansson.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#define BLAS_THREADS "OPENBLAS_NUM_THREADS"

static const char usage[] =
    "spillway trains models that do not fit: state streams from host memory and NVMe.\n"
    "\n"
    "  spillway train CONFIG.json [--set a.b=c ...] [--resume DIR] [--trace FILE] [--quiet]\n"
    "  spillway plan CONFIG.json       where every byte will live, what a step moves, how long it takes, and why\n"
    "  spillway generate CKPT|DIR --prompt TEXT ...   text from a checkpoint or a Hugging Face folder\n"
    "  spillway eval CKPT|DIR --data PATH...           its loss and perplexity on data\n"
    "  spillway export SRC --to DIR    a Hugging Face folder from a checkpoint, another folder or llm.c weights "
    "(import: the same)\n"
    "  spillway inspect PATH           tensors of a safetensors file, a Hugging Face folder or a checkpoint\n"
    "  spillway tokenize IN... --tokenizer PATH -o OUT.bin   text files to one file of tokens\n"
    "  spillway doctor [PATH ...]      what this machine offers, and the fix for what is missing\n"
    "  spillway bench io PATH ...      what swap paths deliver, beside a bare io_uring loop\n"
    "  spillway bench adam             how close the optimizers come to memory bandwidth\n"
    "  spillway bench copy             what copies between host and device deliver, beside memcpy\n"
    "  spillway bench comm -n RANKS    what ranks receive from each other, on a host and between hosts\n"
    "  spillway bench gemm|attention   what the device computes, beside its peak\n"
    "  spillway tune PATH ... [-o F]   the best aio settings, and what a training step will cost\n"
    "  spillway plot BENCH.json -o OUT.svg\n"
    "  spillway help [COMMAND]         spillway help config: every configuration key; help config WORD: those that say "
    "it\n"
    "  spillway --version\n"
    "\n"
    "exit codes: 0 done, 1 failed, 2 bad usage or configuration, 3 does not fit the budgets,\n"
    "            4 train ended before its last step, by a signal or to pause: go on with --resume\n";

static const char train_usage[] =
    "spillway train CONFIG.json [-n RANKS] [--set a.b=c ...] [--resume DIR [--resume-anyway]] [--trace FILE] "
    "[--quiet]\n"
    "\n"
    "  -n RANKS       so many ranks on this machine; across machines mpirun, srun or torchrun start them\n"
    "  --set a.b=c    overrides one key of the configuration (spillway help config lists them); in paths there and\n"
    "                 in the file a leading ~/ is the home folder, and others begin where the program is started\n"
    "                 (those of include: where the file is that says it)\n"
    "  --resume DIR   goes on from a checkpoint, or from the newest complete one in a folder; a configuration or\n"
    "                 data that would change what is computed are refused, with every difference. DeepSpeed's are\n"
    "                 taken too, of ZeRO stage 1, 2 and 3: the folder that save_checkpoint() was given, or one in it;\n"
    "                 and FSDP's: a folder with .metadata, or a Trainer's with pytorch_model_fsdp_0 and optimizer_0,\n"
    "                 or optimizer.bin beside weights;\n"
    "                 and llm.c's: its folder, or one of the model_<step>.bin in it\n"
    "  --resume-anyway  shows the differences and goes on with what is set now\n"
    "  --trace FILE   writes a timeline for Perfetto (ui.perfetto.dev)\n"
    "  --quiet        no step lines, only the closing table and warnings\n"
    "\n"
    "Ctrl-C finishes the step, saves if a checkpoint_dir is set, removes the swap files and exits with 4, where a run\n"
    "that did all its steps exits with 0; so do SIGTERM, SIGUSR1 (Slurm: --signal=USR1@120), a terminal that closes "
    "(not\n"
    "under nohup) and output that nobody reads any more. A second Ctrl-C, a second later or more, ends at once, as "
    "the\n"
    "first one does before the first step; the next run then reclaims the swap files. SIGTERM behind SIGUSR1 is the\n"
    "first one: what is being saved is saved, if it is before SIGKILL.\n";

static const char plan_usage[] =
    "spillway plan CONFIG.json [--set a.b=c ...] [--hosts N] [--gpu NAME] [--rate NAME=NUMBER ...]\n"
    "                    [--json] [--faster] [--calibrate | --no-measure]\n"
    "spillway plan --table [--params 7.5e9] [--ranks LIST] [--mp LIST]\n"
    "\n"
    "Plans as train does and takes nothing: bytes per tier and purpose, bytes of a step per link, the predicted\n"
    "time of a step and its bound, disk wear, and each automatic decision with its reason. When it does not fit,\n"
    "the nearest configuration that does, as options to paste, and exit code 3. Rates are measured in about two\n"
    "seconds, once in 30 days for each machine and path. What stays: these rates, by which train, too, then chooses\n"
    "what a GPU holds, and in data.cache_dir the tokens of text and JSON lines, which are made here if training has\n"
    "not made them, and found by it.\n"
    "\n"
    "  --set a.b=c    overrides one key of the configuration\n"
    "  --hosts N      spillway.ranks ranks are on N hosts, equally many on each, and this is one of them (default: "
    "all\n"
    "                 on this one); what a rank receives from the others in a step, and from other hosts, is counted\n"
    "  --gpu NAME     plans for this GPU, which need not be here: h100, rtx4090, ... (a name that is not known shows\n"
    "                 all of them); what it computes, copies and receives from others is estimated\n"
    "  --rate N=X     a rate in place of what was measured or estimated: compute (TFLOP/s), optimizer (G params/s), "
    "or\n"
    "                 in GB/s nvme (both ways), nvme_read, nvme_write, h2d, d2h, ranks (what a rank receives within "
    "its\n"
    "                 host), network (all that a host does from others; 12.5: 100 Gbit/s)\n"
    "  --json         the same as one JSON object\n"
    "  --calibrate    measures again what the cache has\n"
    "  --no-measure   neither measures nor predicts times\n"
    "  --faster       looks for settings with which a step is predicted to be shorter and no bit of the training "
    "another,\n"
    "                 and shows them as options to paste\n"
    "\n"
    "  --table        memory per device for ZeRO stages 0 to 3, mixed-precision Adam\n"
    "  --params N     parameters (default 7.5e9)\n"
    "  --ranks LIST   numbers of data-parallel ranks (default 1,4,16,64,256,1024)\n"
    "  --mp LIST      degrees of model parallelism (default 1)\n";

#define PLACE_USAGE                                                                                                    \
    "  --host-memory BYTES    budget for host memory: with --nvme, what it holds is not read again and again\n"        \
    "  --device-memory BYTES  budget for the device, working memory and keys and values included\n"                    \
    "  --nvme DIR             weights are in a swap file there and read when they are used; may be given several "     \
    "times\n"                                                                                                          \
    "  --codes int8|int4|none matrices between embeddings and head are stored as codes, 1.03 or 0.53 bytes each;\n"    \
    "                         published: in those that the folder has, with the numbers' bits\n"                       \
    "                         (default: as the checkpoint was trained, of a folder published)\n"

static const char generate_usage[] =
    "spillway generate CKPT|DIR --prompt TEXT [--prompt TEXT ... | --prompts FILE] [--tokens N] [--temperature T]\n"
    "                  [--top-k K] [--top-p P] [--seed S] [--tokenizer DIR] [--chat LAYOUT | --ids] [--json]\n"
    "                  [--batch-size N] [--host-memory BYTES] [--device-memory BYTES] [--nvme DIR] [--codes C]\n"
    "\n"
    "Draws text. A prompt's text is the same alone and beside others, and wherever the weights are, with one\n"
    "exception: where a text with --tokens can go beyond the original positions of a model with longrope (Phi-3,\n"
    "Phi-4), all texts are by its long factors, with a line on stderr. Text ends at the model's end-of-text token;\n"
    "one that is longer than the model's positions goes on from the last half of them, with a line on stderr\n"
    "(--json: restarts). A last line on stderr says how fast it was.\n"
    "\n"
    "  CKPT             a checkpoint, or a folder of checkpoints (the newest complete one)\n"
    "  DIR              a folder with config.json and safetensors, or what the Hugging Face cache has of a model of "
    "the\n"
    "                   hub: OWNER/NAME, or OWNER/NAME@COMMIT\n"
    "  --prompt TEXT    what to go on from; several run together\n"
    "  --prompts FILE   one on each line; -: of stdin\n"
    "  --batch-size N   texts that are drawn at once (default 16): each step brings weights that are not on the "
    "device\n"
    "                   once for all of them, and each takes memory for its keys and values\n"
    "  --tokens N       how many tokens to draw (default 200)\n"
    "  --temperature T  0 takes the likeliest token (default 0.8)\n"
    "  --top-k K        draws among the K likeliest only (default 0: all)\n"
    "  --top-p P        and among the fewest whose probabilities add up to P (default 1: all)\n"
    "  --seed S         the same seed gives the same text (default 1)\n"
    "  --tokenizer DIR  a tokenizer.json, vocab.json with merges.txt, or tiktoken.model (default: the one\n"
    "                   that training took, in DIR; else bytes)\n"
    "  --chat LAYOUT    each prompt is a user's turn, and the text ends with the answer's: auto, or as data.chat\n"
    "  --ids            prompts and text are token numbers, such as 5,17,2\n"
    "  --json           one JSON object for each prompt\n" PLACE_USAGE;

static const char eval_usage[] =
    "spillway eval CKPT|DIR --data PATH... [--seq-length N] [--batches N] [--batch-size N] [--format F]\n"
    "              [--text-field F] [--chat LAYOUT] [--tokenizer DIR] [--json] [--host-memory BYTES] "
    "[--device-memory BYTES]\n"
    "              [--nvme DIR] [--codes C] [--pairs [--reference CKPT|DIR]]\n"
    "\n"
    "Mean loss and perplexity (its exponential) over data in any format that train reads. Whole sequences count.\n"
    "Or of pairs of answers: how many chosen ones have the larger reward, by how much, and the loss of training on "
    "them.\n"
    "\n"
    "  --data PATH      files or globs; may be given several times\n"
    "  --seq-length N   tokens of a sequence (default: the checkpoint's, at most the model's positions; of a folder\n"
    "                   those, at most 1024)\n"
    "  --batches N      stops after N batches, drawn from all sequences in the order of the data's seed (default: "
    "all)\n"
    "  --batch-size N   sequences that are computed together (default: the checkpoint's micro-batch, else 1)\n"
    "  --format F       auto, text, llm.c, llmq, megatron or jsonl (default auto, as data.format)\n"
    "  --text-field F   of JSON lines, which the data must have then, and with --chat\n"
    "  --chat LAYOUT    JSON lines are conversations, and the assistant's turns count: as data.chat (default: the\n"
    "                   checkpoint's)\n"
    "  --tokenizer DIR  as of generate\n"
    "  --pairs          data are pairs of answers, and the rule is the checkpoint's (of a folder, or trained on texts: "
    "dpo)\n"
    "  --reference DIR  with --pairs: rewards are beside what these weights make of the answers, as training's are "
    "beside\n"
    "                   its start (default: beside nothing, so a reward is beta log p)\n"
    "  --json           one JSON object; a loss that is not finite is null, and makes the exit code 1\n" PLACE_USAGE;

static const char export_usage[] =
    "spillway export SRC --to DIR [--dtype fp32|bf16|fp16] [--shard-size BYTES] [--model FOLDER]\n"
    "spillway import SRC --to DIR ...   the same\n"
    "\n"
    "Writes a Hugging Face folder, which transformers and model.path read: config.json, weights, and the tokenizer's "
    "files\n"
    "where the source has them. SRC is a checkpoint or a folder of checkpoints (the newest), DeepSpeed's, FSDP's and\n"
    "llm.c's too, a Hugging Face folder, or a model file of llm.c. It may be a Trainer's checkpoint-N. Of other\n"
    "programs' checkpoints the masters are taken, also where 16-bit weights lie beside them. Adapters are merged. "
    "Tensors\n"
    "pass one block at a time, so memory stays small whatever the model.\n"
    "\n"
    "  --to DIR            a folder that does not exist yet\n"
    "  --dtype T           type of the weights (default: as stored; fp32 from a checkpoint gives its masters)\n"
    "  --shard-size BYTES  new files of at most so many bytes (5GB), with an index\n"
    "  --model FOLDER      whose config.json and tokenizer belong to SRC, where it has none: DeepSpeed's, FSDP's, but\n"
    "                      not a Trainer's checkpoint-N that has config.json itself. Of peft's adapters alone: whose "
    "weights\n"
    "                      they are beside (default: the folder that adapter_config.json names)\n";

static const char inspect_usage[] =
    "spillway inspect PATH [--digest] [--json]\n"
    "\n"
    "Checks and lists the tensors of a file of safetensors or torch.save, a Hugging "
    "Face folder (one file or shards), a\n"
    "checkpoint, also DeepSpeed's or FSDP's, or the newest complete one in a folder: name, "
    "dtype, shape, bytes. Of a folder also\n"
    "what its config.json describes, and whether the tensors are those of that model. Of a Trainer's checkpoint-N "
    "with\n"
    "DeepSpeed's or FSDP's state the masters are shown.\n"
    "\n"
    "  --digest  reads every tensor and shows the XXH3 (64 bit) of its bytes; of a checkpoint the files are compared "
    "with\n"
    "            the digests that were saved with them, too\n"
    "  --json    the same as one JSON object\n";

static const char doctor_usage[] =
    "spillway doctor [PATH ...]\n"
    "\n"
    "Lists libraries, instruction set, io_uring, O_DIRECT and alignment of each PATH, memory\n"
    "limits, NUMA and GPU: each OK, or missing with the fix.\n";

static const char bench_io_usage[] =
    "spillway bench io PATH... [--size S] [--block LIST] [--depth LIST] [--threads N] [--backend LIST]\n"
    "                          [--pattern LIST] [--seconds S] [--sqpoll] [--iopoll] [--json] [--smoke]\n"
    "\n"
    "io: reads and writes a file in each PATH as training does, then checks every byte of it. Rounds with\n"
    "this library and with a bare io_uring loop take turns; shown are medians. Several paths are measured\n"
    "one by one and all at once. The file has no name, so nothing is left, whatever ends it.\n"
    "\n"
    "  --size S        bytes of the file (default 2GiB; a multiple of 64MiB)\n"
    "  --block LIST    bytes of a transfer, such as 256KiB,1MiB (default 256KiB; powers of two to 32MiB)\n"
    "  --depth LIST    transfers in flight, such as 4,8,16 (default 8)\n"
    "  --threads N     threads of that backend (default: as many as the depth)\n"
    "  --backend LIST  auto, io_uring, threads (default auto)\n"
    "  --pattern LIST  read, write, mixed (as much of each), swap: records in, compute gap, records out in\n"
    "                  place, weights read ahead (default: all four)\n"
    "  --seconds S     of each round, three rounds to a row (default 1)\n"
    "  --sqpoll, --iopoll  as the aio keys of the configuration\n"
    "  --json          one JSON object per row; spillway plot draws it\n"
    "  --smoke         a small file and short rounds: shows that it runs, measures nothing\n";

static const char bench_adam_usage[] =
    "spillway bench adam [--params N] [--format F|all ...] [--optimizer O|all ...] [--threads T] [--isa I]\n"
    "                    [--grad fp32|bf16|fp16] [--check] [--check-factor X] [--json] [--smoke]\n"
    "\n"
    "adam: a step of an optimizer beside a stream over the same arrays, in turn; the default is Adam in every\n"
    "state format on all CPUs. --format and --optimizer may be given several times. %logged and %back are the\n"
    "time of a step over that of one that can be taken back, as those ahead of the gradient's norm, and of that.\n"
    "\n"
    "  --check           rows have limits: 0.90 of the stream's rate in fp32, mixed and split, 0.80 in split-bf16,\n"
    "                    and split's parameters per second in split-int8 and split24-int8, in the time of the best\n"
    "                    quarter of the repetitions; and 70 % logged, 40 in packed formats. These are Adam's; of the\n"
    "                    others with AVX-512 0.80, 0.75 in split-bf16, and mixed-fp16 too. Packed formats with AVX2\n"
    "                    have three quarters of their limits. A row below is measured again, up to two times, and\n"
    "                    then makes the exit code 1\n"
    "  --check-factor X  the same, with every limit multiplied by X\n"
    "  --json, --smoke   one JSON object per row; few parameters: shows that it runs, measures nothing\n";

static const char bench_copy_usage[] =
    "spillway bench copy [--device cpu] [--size LIST] [--seconds S] [--json] [--smoke]\n"
    "\n"
    "copy: host to device, device to host, both at once and device to device, bf16 as it is and\n"
    "converted from or to fp32, from pinned and pageable memory, beside memcpy in the same run.\n"
    "Every copied element is checked; one that is wrong makes the exit code 1.\n"
    "\n"
    "  --device NAME  the device to copy to and from (default cpu)\n"
    "  --size LIST    bytes of the source, such as 256KiB,4MiB (default 256KiB,4MiB,64MiB)\n"
    "  --seconds S    time for each row (default 1)\n"
    "  --json         a header and one JSON object per row, with every sample; spillway plot draws it\n"
    "  --smoke        tiny sizes and 2 repetitions: shows that it runs, measures nothing\n";

static const char bench_comm_usage[] =
    "spillway bench comm [-n RANKS] [--device auto] [--collectives auto|host|nccl] [--size LIST] [--seconds S]\n"
    "                    [--json] [--smoke]\n"
    "\n"
    "comm: GB that ranks receive from each other in a second where weights are gathered, where gradients are\n"
    "summed up, and where both happen at once: from the ranks of a host (beside memcpy, where they share its\n"
    "memory), and from other hosts, whose ranks share the network. To be started as the training is: what is\n"
    "found at the largest size is kept on each host, and from then on spillway plan predicts, and spillway train\n"
    "bounds steps, with it (for as many ranks on a host). Every element is checked; one that is wrong makes the\n"
    "exit code 1.\n"
    "\n"
    "  -n RANKS           so many ranks on this machine; across machines mpirun, srun or torchrun start them\n"
    "  --device NAME      auto, cpu, cuda or cuda:1 (default auto)\n"
    "  --collectives C    auto: devices are linked where NCCL can; host, nccl (default auto)\n"
    "  --size LIST        bytes of a unit, over all ranks (default 4MiB,64MiB)\n"
    "  --seconds S        time for each row (default 1)\n"
    "  --json             a header and one JSON object per row\n"
    "  --smoke            small, few calls, nothing is kept: shows that it runs, measures nothing\n";

static const char bench_device_usage[] =
    "spillway bench gemm|attention [--device auto] [--compute fp32|bf16|fp16] [--seconds S] [--json] [--smoke]\n"
    "\n"
    "gemm, attention: products, or causal and linear attention, at the shapes of real models, forward and\n"
    "backward, in TFLOP/s beside the device's peak, or where that is not known beside a square product in turn\n"
    "with each row. Samples of every forward result, of products' gradients towards their input and of\n"
    "experts' weights' are checked against sums in fp64; one that is wrong makes the exit code 1.\n"
    "\n"
    "  --device NAME   auto, cpu, cuda or cuda:1 (default auto)\n"
    "  --compute TYPE  what a GPU computes in (default bf16); the cpu device computes in fp32\n"
    "  --seconds S     time for each row (default 0.5)\n"
    "  --json          a header and one JSON object per row, with every sample\n"
    "  --smoke         tiny shapes, few repetitions: shows that it runs, measures nothing\n";

static const char tune_usage[] =
    "spillway tune PATH... [--seconds N] [--size S] [--params P] [--json] [-o FILE]\n"
    "\n"
    "Searches block size, queue depth and backend with the pattern of a training step on each PATH, shows\n"
    "what it found, and predicts the NVMe part of a step.\n"
    "\n"
    "  --seconds N  for each path, 5 to 3600 (default 60)\n"
    "  --size S     bytes of the file in each path, at least 256MiB (default 1GiB)\n"
    "  --params P   predict for a model of P parameters, such as 7e9 (default: a few sizes)\n"
    "  --json       one JSON object per measurement instead of tables; spillway plot draws it\n"
    "  -o FILE      writes the aio section and the paths, from the root on, with their weights; a\n"
    "               configuration takes it with \"include\": \"FILE\"\n";

static const char plot_usage[] =
    "spillway plot BENCH.json -o OUT.svg\n"
    "\n"
    "Draws what spillway bench --json wrote: GB/s by size, one panel per pattern (or op), one line per\n"
    "path, backend and depth; bars where there is only one size.\n"
    "\n"
    "  BENCH.json  one JSON object per line, or one array of objects\n"
    "  -o OUT.svg  the picture; written beside it first, then renamed\n";

static const char tokenize_usage[] =
    "spillway tokenize IN... --tokenizer PATH -o OUT.bin [--format F] [--field NAME] [--end TEXT] [--begin TEXT] "
    "[--special]\n"
    "                  [--threads N] [--quiet]\n"
    "\n"
    "Writes the tokens of text files as llm.c reads them: a header of 1024 bytes, then uint16 for each token, or "
    "uint32\n"
    "where the vocabulary has more than 65536. Each file is a document, or of JSON lines each line; every document\n"
    "starts with the end-of-text token; empty ones are left out. Any bytes will do as text, not UTF-8 alone, but what\n"
    "begins as a compressed file, a table or another binary one does needs --format text.\n"
    "The output is the same for any number of threads, and takes its place when it is complete.\n"
    "\n"
    "  --tokenizer PATH  tokenizer.json, vocab.json with merges.txt beside it, tiktoken.model, or a folder that holds "
    "them\n"
    "  -o OUT.bin        the tokens, at most 2147483647\n"
    "  --end TEXT        the token before every document (default: <|endoftext|> or <|end_of_text|>, else eos_token "
    "of\n"
    "                    tokenizer_config.json, else <|im_end|>); '' puts none\n"
    "  --begin TEXT      the token behind it (default: what the tokenizer puts before a text, if it does); '' puts "
    "none\n"
    "  --format F        text, jsonl, or auto by each file: JSON lines are in .jsonl, .ndjson and a .json that begins "
    "with an\n"
    "                    object (default auto)\n"
    "  --field NAME      the text in a JSON line (default text); conversations are for data.chat, because this\n"
    "                    format has no place for which tokens get loss\n"
    "  --special         special tokens that are spelled out in the text are tokens (default: plain text)\n"
    "  --threads N       default: all CPUs\n"
    "  --quiet           no progress and no closing line\n";

static char speaker[40] = "spillway: ";

void
cli_set_rank(uint32_t rank)
{
    snprintf(speaker, sizeof speaker, "spillway: rank %u: ", rank);
}

int
cli_exit_code(const spw_error *err)
{
    switch (err->status) {
    case SPW_ENOFIT: return EXIT_NO_FIT;
    case SPW_ECONFIG: return EXIT_USAGE;
    default: return EXIT_FAILED;
    }
}

spw_status
cli_show_json(const char *command, size_t digits, json_t *object, spw_error *err)
{
    int rc = object == NULL ? -1 : json_dumpf(object, stdout, JSON_COMPACT | JSON_REAL_PRECISION(digits));
    json_decref(object);
    putchar('\n');
    return rc == 0 ? SPW_OK : SPW_RAISE(err, SPW_EIO, "%s: writing JSON", command);
}

/* Of the character that bytes begin with, by the library's own rule; 0: they begin with none. */
static uint64_t
character_bytes(const char *bytes, uint64_t count)
{
    for (uint64_t n = 1; n <= 4 && n <= count; n++) {
        json_t *s = json_stringn(bytes, n);
        if (s != NULL) {
            json_decref(s);
            return n;
        }
    }
    return 0;
}

json_t *
cli_json_bytes(const char *bytes, uint64_t count)
{
    json_t *s = json_stringn(bytes, count);
    char *replaced;
    uint64_t end = 0;
    if (s != NULL)
        return s;
    replaced = spw_mem_calloc(3 * count + 1, 1);
    if (replaced == NULL)
        return json_null();
    for (uint64_t i = 0, n; i<count; i += n> 0 ? n : 1) {
        n = character_bytes(bytes + i, count - i);
        memcpy(replaced + end, n > 0 ? bytes + i : "\xef\xbf\xbd", n > 0 ? n : 3);
        end += n > 0 ? n : 3;
    }
    s = json_stringn(replaced, end);
    spw_mem_free(replaced);
    return s != NULL ? s : json_null();
}

json_t *
cli_json_text(const char *text)
{
    return cli_json_bytes(text, strlen(text));
}

int
cli_fail(const spw_error *err)
{
    fprintf(stderr, "%s%s\n", speaker, err->message);
    return cli_exit_code(err);
}

int
cli_usage(const char *command, const char *fmt, ...)
{
    va_list args;
    fprintf(stderr, "spillway %s: ", command);
    va_start(args, fmt);
    vfprintf(stderr, fmt, args);
    va_end(args);
    fprintf(stderr, "\nspillway help%s%s shows how it is used\n", strcmp(command, "help") == 0 ? "" : " ",
            strcmp(command, "help") == 0 ? "" : command);
    return EXIT_USAGE;
}

const char *
cli_value(const char *command, int argc, char **argv, int *i)
{
    if (*i + 1 >= argc) {
        cli_usage(command, "%s needs a value", argv[*i]);
        return NULL;
    }
    return argv[++*i];
}

int
cli_unknown_option(const char *command, const char *name)
{
    const char *digits = name + strcspn(name, "0123456789"), *value = strchr(name, '=');
    const int length = value != NULL ? (int)(value - name) : 2;
    if (value == NULL && (name[1] == '-' || digits != name + 2 || *digits == '\0')) /* not as in -n2 */
        return cli_usage(command, "unknown option %s", name);
    value = value != NULL ? value + 1 : digits;
    return cli_usage(command, "unknown option %s; a value is an argument of its own: %.*s %s", name, length, name,
                     value);
}

const char *
cli_known_value(const char *command, const char *const *names, int argc, char **argv, int *i)
{
    for (; *names != NULL; names++) {
        if (strcmp(argv[*i], *names) == 0)
            return cli_value(command, argc, argv, i);
    }
    cli_unknown_option(command, argv[*i]);
    return NULL;
}

bool
cli_number(const char *text, uint64_t *out)
{
    char *end;
    if (text[0] < '0' || text[0] > '9')
        return false;
    errno = 0;
    *out = strtoull(text, &end, 10);
    return errno == 0 && *end == '\0';
}

/* Of the keys, those that say it: in the name or in what it does. */
typedef struct filter {
    const char *word; /* NULL: all */
    bool found;
} filter;

static void
print_line(void *ctx, const char *text)
{
    filter *f = ctx;
    if (f->word != NULL && strcasestr(text, f->word) == NULL)
        return;
    f->found = true;
    puts(text);
}

/* which: of bench, or NULL for all. */
static int
help_bench(const char *which)
{
    static const struct {
        const char *name, *usage;
    } all[] = {{"io", bench_io_usage},     {"adam", bench_adam_usage},   {"copy", bench_copy_usage},
               {"comm", bench_comm_usage}, {"gemm", bench_device_usage}, {"attention", bench_device_usage}};
    bool shown = false;
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        if (which != NULL ? strcmp(which, all[i].name) != 0 : i > 0 && all[i].usage == all[i - 1].usage)
            continue;
        printf("%s%s", shown ? "\n" : "", all[i].usage);
        shown = true;
    }
    return shown ? EXIT_DONE : cli_usage("help", "there is no benchmark %s", which);
}

static int
help(const char *command, const char *which)
{
    static const struct {
        const char *name, *usage;
    } all[] = {{"train", train_usage},       {"plan", plan_usage},     {"generate", generate_usage},
               {"eval", eval_usage},         {"export", export_usage}, {"import", export_usage},
               {"inspect", inspect_usage},   {"doctor", doctor_usage}, {"tune", tune_usage},
               {"tokenize", tokenize_usage}, {"plot", plot_usage}};
    if (command == NULL || strcmp(command, "help") == 0) {
        fputs(usage, stdout);
        return EXIT_DONE;
    }
    if (strcmp(command, "bench") == 0)
        return help_bench(which);
    if (strcmp(command, "config") == 0) {
        filter f = {which, false};
        spw_config_help(print_line, &f);
        return f.found ? EXIT_DONE : cli_usage("help", "no configuration key says %s", which);
    }
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        if (strcmp(command, all[i].name) == 0) {
            fputs(all[i].usage, stdout);
            return EXIT_DONE;
        }
    }
    return cli_usage("help", "there is no command %s", command);
}

static void
log_line(void *ctx, spw_log_level level, const char *line)
{
    (void)ctx;
    if (level >= SPW_LOG_NOTE || getenv("SPW_VERBOSE") != NULL)
        fprintf(stderr, "spillway: %s%s\n", level >= SPW_LOG_WARN ? "warning: " : "", line);
}

void
cli_log(bool shown)
{
    spw_log_set(shown ? log_line : NULL, NULL);
}

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
} commands[] = {{"train", cli_train},   {"plan", cli_plan},     {"generate", cli_generate}, {"eval", cli_eval},
                {"export", cli_export}, {"import", cli_export}, {"inspect", cli_inspect},   {"tokenize", cli_tokenize},
                {"doctor", cli_doctor}, {"bench", cli_bench},   {"tune", cli_tune},         {"plot", cli_plot}};

/* The argument that names a file or folder and is empty, as of a variable that is not set; 0: none. What is in it would be looked for in the root. */
static int
find_unnamed(int argc, char **argv)
{
    static const char *const before[] = {"--resume", "--model", "--tokenizer", "--data", "--reference", "--prompts"};
    if (strcmp(argv[0], "doctor") == 0 || strcmp(argv[0], "bench") == 0 || strcmp(argv[0], "tune") == 0)
        return 0; /* say it of their paths */
    for (int i = 1; i < argc; i++) {
        bool path = argv[i - 1][0] != '-';
        for (size_t k = 0; k < sizeof before / sizeof before[0]; k++)
            path = path || strcmp(argv[i - 1], before[k]) == 0;
        if (argv[i][0] == '\0' && path)
            return i;
    }
    return 0;
}

/* argv[0] is the command. */
static int
run_command(int argc, char **argv)
{
    const char *which = argc > 1 && argv[1][0] != '-' ? argv[1] : NULL;
    int empty;
    if (strcmp(argv[0], "--version") == 0) {
        printf("spillway %s\n", SPW_VERSION);
        return EXIT_DONE;
    }
    if (strcmp(argv[0], "help") == 0 || strcmp(argv[0], "--help") == 0 || strcmp(argv[0], "-h") == 0)
        return help(which, which != NULL && argc > 2 ? argv[2] : NULL);
    for (size_t k = 0; k < sizeof commands / sizeof commands[0]; k++) {
        if (strcmp(argv[0], commands[k].name) != 0)
            continue;
        for (int i = 1; i < argc; i++) {
            if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0)
                return help(argv[0], which);
        }
        if ((empty = find_unnamed(argc, argv)) > 0)
            return cli_usage(argv[0], "%s is empty: a variable that is not set?",
                             argv[empty - 1][0] == '-' ? argv[empty - 1] : "the name of a file or folder");
        return commands[k].run(argc, argv);
    }
    fprintf(stderr, "spillway: there is no command %s; spillway help lists them\n", argv[0]);
    return EXIT_USAGE;
}

/* Where 0, 1 or 2 are closed the next file opened would be one of them, and what is said would be written into it. */
static void
open_standard_files(void)
{
    int fd;
    do
        fd = open("/dev/null", O_RDWR);
    while (fd >= 0 && fd <= STDERR_FILENO);
    if (fd >= 0)
        close(fd);
}

/* A checkpoint of hundreds of ranks is read with all its files open, and the soft limit is often 1024 where many more may be. */
static void
allow_open_files(void)
{
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) != 0)
        return;
    files.rlim_cur = files.rlim_max;
    (void)setrlimit(RLIMIT_NOFILE, &files); /* a refusal leaves what was */
}

/*
 * A plan and an engine's options are on the stack, some 200 KB of them, and threads get as much stack as the limit says when libc is loaded.
 * So a small soft limit is raised to what systems come with, for threads too; false, and it is said: the hard one is too small.
 */
static bool
have_stack(void)
{
    const rlim_t usual = 8 << 20, least = 1 << 20;
    struct rlimit stack;
    pthread_attr_t threads;
    char bytes[32];
    if (getrlimit(RLIMIT_STACK, &stack) != 0 || stack.rlim_cur >= usual) /* unlimited is the largest number */
        return true;
    stack.rlim_cur = stack.rlim_max < usual ? stack.rlim_max : usual;
    if (stack.rlim_cur < least) {
        fprintf(stderr, "spillway: the stack's limit is %s (ulimit -s), and 1024 KiB are needed\n",
                spw_format_bytes(bytes, sizeof bytes, stack.rlim_cur));
        return false;
    }
    (void)setrlimit(RLIMIT_STACK, &stack);
    if (pthread_attr_init(&threads) == 0) {
        if (pthread_attr_setstacksize(&threads, stack.rlim_cur) == 0)
            (void)pthread_setattr_default_np(&threads);
        (void)pthread_attr_destroy(&threads);
    }
    return true;
}

/*
 * OpenBLAS makes a thread for each CPU while it is loaded, though products here are on threads of ours, and each maps 128 MiB. Under a limit
 * on mappings they are refused for ever, and exit() waits for them, or OpenBLAS ends the program. So it begins again and tells it of one:
 * before any library begins, and before libc has taken the environment.
 */
static void
begin_without_blas_threads(int argc, char **argv, char **envp)
{
    static const int kinds[] = {RLIMIT_AS, RLIMIT_DATA};
    struct rlimit most;
    bool limited = false;
    (void)argc;
    environ = envp;
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
        limited = limited || (getrlimit(kinds[i], &most) == 0 && most.rlim_cur != RLIM_INFINITY);
    if (limited && getenv(BLAS_THREADS) == NULL && setenv(BLAS_THREADS, "1", 0) == 0)
        (void)execv("/proc/self/exe", argv); /* a refusal leaves what was */
}
__attribute__((section(".preinit_array"), used)) static void (*const first)(int, char **,
                                                                            char **) = begin_without_blas_threads;

int
main(int argc, char **argv)
{
    int rc;
    open_standard_files();
    allow_open_files();
    if (!have_stack())
        return EXIT_FAILED;
    (void)prctl(PR_SET_NAME, "spillway"); /* of ranks, too, which are started from /proc/self/exe */
    if (argc < 2) {
        fputs(usage, stderr);
        return EXIT_USAGE;
    }
    cli_log(true);
    (void)signal(SIGXFSZ, SIG_IGN); /* a file beyond ulimit -f: an error of the write, told with its path */
    rc = run_command(argc - 1, argv + 1);
    if ((fflush(stdout) != 0 || ferror(stdout)) && rc == EXIT_DONE) {
        fprintf(stderr, "%swriting the output failed: %s\n", speaker, strerror(errno));
        rc = EXIT_FAILED;
    }
    return rc;
}
