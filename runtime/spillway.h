/* spillway.h - everything public. */
#ifndef SPILLWAY_H
#define SPILLWAY_H
#include "spw_base.h"
#include "spw_codes.h"
#include "spw_aio.h"
#include "spw_cpu_adam.h"
#include "spw_gpu.h"
#include "spw_offload.h"
#include "spw_nn.h"
#include "spw_data.h"
#include "spw_tokenizer.h"
#include "spw_chat.h"
#include "spw_files.h"
#include "spw_config.h"
#include "spw_engine.h"
#include "spw_access.h"
#include "spw_generate.h"
#include "spw_monitor.h"
#include "spw_rank_bench.h"
#include "spw_reference.h"
#endif
