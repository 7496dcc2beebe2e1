package models

import (
	"crypto/tls"
	"errors"
	"net"
	"net/url"

	openai "github.com/sashabaranov/go-openai"
)

// transportError converts a network error, or go-openai's validation error, to an Error.
func transportError(err error) *Error {
	if wrapped, ok := errors.AsType[*url.Error](err); ok {
		err = wrapped.Err // the outer text repeats the URL
	}
	e := &Error{Message: oneLine(err.Error()), Retryable: true, cause: err}
	var dns *net.DNSError
	var certificate *tls.CertificateVerificationError
	var dial *net.OpError
	switch {
	case errors.As(err, &dns):
		e.Code, e.Retryable = codeUnreachable, !dns.IsNotFound
	case errors.As(err, &certificate):
		e.Code, e.Retryable = codeUnreachable, false
	case errors.As(err, &dial) && dial.Op == "dial":
		e.Code = codeUnreachable
	case rejectedLocally(err), errors.Is(err, errWebPage), errors.Is(err, errAnswerTooLong):
		e.Retryable = false
	}
	return e
}

// rejectedLocally reports whether go-openai rejected the request before it sent anything.
func rejectedLocally(err error) bool {
	for _, validationErr := range []error{
		openai.ErrChatCompletionInvalidModel, openai.ErrContentFieldsMisused,
		openai.ErrReasoningModelMaxTokensDeprecated, openai.ErrReasoningModelLimitationsOther,
		openai.ErrReasoningModelLimitationsLogprobs, openai.ErrReasoningEffortUnsupported,
		openai.ErrReasoningToolsRequireResponses, openai.ErrReasoningSamplingUnsupported,
	} {
		if errors.Is(err, validationErr) {
			return true
		}
	}
	return false
}
