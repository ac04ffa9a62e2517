// RETURN_IF_ERROR(expr) and ASSIGN_OR_RETURN(lhs, expr): early return of an absl::Status, the only
// control flow macros we have.
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define RETURN_IF_ERROR(expr)                                        \
  do {                                                               \
    absl::Status return_if_error_status = (expr);                    \
    if (!return_if_error_status.ok()) return return_if_error_status; \
  } while (false)

#define TWINSPARK_CONCAT_INNER(a, b) a##b
#define TWINSPARK_CONCAT(a, b) TWINSPARK_CONCAT_INNER(a, b)
#define ASSIGN_OR_RETURN(lhs, expr) \
  ASSIGN_OR_RETURN_INNER(TWINSPARK_CONCAT(assign_or_return_, __LINE__), lhs, expr)
#define ASSIGN_OR_RETURN_INNER(value, lhs, expr) \
  auto value = (expr);                           \
  if (!value.ok()) return value.status();        \
  lhs = *std::move(value)
