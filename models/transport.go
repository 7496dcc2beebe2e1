package models

import (
	"crypto/tls"
	"errors"
	"net"
	"net/http"
	"net/url"
)

// transportError converts the error of a request without a usable response.
func transportError(err error) *Error {
	if wrapped, ok := errors.AsType[*url.Error](err); ok {
		err = wrapped.Err // the outer text repeats the URL
	}
	e := &Error{Message: oneLine(err.Error()), Retryable: true, cause: err}
	var dns *net.DNSError
	var certificate *tls.CertificateVerificationError
	var dial *net.OpError
	switch {
	case errors.As(err, &dns): // before dial, because a failed dial wraps it
		e.Code, e.Retryable = codeUnreachable, !dns.IsNotFound
	case errors.As(err, &certificate), errors.Is(err, http.ErrSchemeMismatch):
		e.Code, e.Retryable = codeUnreachable, false
	case errors.As(err, &dial) && dial.Op == "dial":
		e.Code = codeUnreachable
	case errors.Is(err, errWebPage), errors.Is(err, errAnswerTooLong):
		e.Retryable = false
	}
	return e
}
