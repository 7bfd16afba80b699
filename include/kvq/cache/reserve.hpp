// cache::reserve: the memory of a step over all layers, ahead of it.
//
//   pages, tables, lists   in the stock of each sequence (cache/page_stock.hpp), as many as chunk::for_each_need says
//   attention              in the caller's workspace, as much as the longest layer's batch takes
//
// Contract: all of it for all sequences, or none. A step that was reserved allocates nothing (tests/properties/reserve.cpp runs
// steps while every allocation fails).
#pragma once

#include "sequence.hpp"

#if !defined(KVQ_COMPILED)
#include "reserve-inl.hpp"
#endif
